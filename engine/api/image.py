"""Images of a prompt, in the form in which the front end passes them to the engine."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

from octavo.block_manager import MediaSpan

from .errors import InvalidRequest

MAX_ASPECT = 200  # longest allowed ratio of sides, as in Qwen's own processor


class Size(NamedTuple):
    """Height and width in pixels."""

    height: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """Rules by which one model turns an image into rows of a prompt: embeddings of squares of the image.

    token                    id of the placeholder token; a prompt has one for each row
    mark                     text that the chat template writes for each image
    text                     text with one placeholder that replaces the mark; "": the mark is the placeholder
    line_ends                ids after each line of rows, and after the last line; empty: none
    is_whole                 each row of an image attends to all rows of the image
    patch, temporal, merge   pixels of a patch's side, copies of a patch, and patches of a square's side
    fit                      "area": whole squares, with min_pixels to max_pixels; "edge": sides of at most
                             ``edge`` in addition, and a small image only grows to whole squares;
                             "square": ``edge`` x ``edge`` pixels; "crop": the middle part of that size
    min_pixels, max_pixels   limits for the pixels of a resized image
    resample                 number of Pillow's filter for resizing
    mean, std                normalization of each channel, from 0 to 1
    """

    token: int
    mark: str
    patch: int
    merge: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    text: str = ""
    line_ends: tuple[int, ...] = ()
    is_whole: bool = False
    temporal: int = 1
    fit: str = "area"
    edge: int = 0
    min_pixels: int = 1
    resample: int = 3

    @property
    def side(self) -> int:
        """Side of the image square that one row represents, in pixels."""
        return self.patch * self.merge

    def size_for(self, size: Size) -> Size:
        """Return the size to which the model's own processor resizes an image. The size has whole squares, an
        allowed number of pixels, and about the same aspect ratio. Raises InvalidRequest if the ratio is too
        large."""
        aspect = max(size) / min(size)
        if aspect > MAX_ASPECT:
            raise InvalidRequest(
                f"a picture's longer side must be at most {MAX_ASPECT} times the shorter one, got "
                f"{size.width} x {size.height} pixels; cut it"
            )
        side, area = self.side, size.height * size.width
        if self.fit in ("square", "crop"):
            return Size(self.edge, self.edge)
        if self.fit == "edge":
            scale = max(1, max(size) / self.edge, math.sqrt(area / self.max_pixels))
            return Size(*(math.ceil(max(1, math.floor(each / scale)) / side) * side for each in size))
        resized = Size(*(round(each / side) * side for each in size))
        if resized.height * resized.width > self.max_pixels:
            scale = math.sqrt(area / self.max_pixels)
            return Size(*(max(side, math.floor(each / scale / side) * side) for each in size))
        if resized.height * resized.width < self.min_pixels:
            scale = math.sqrt(self.min_pixels / area)
            return Size(*(math.ceil(each * scale / side) * side for each in size))
        return resized


class PromptImage(NamedTuple):
    """An image of a prompt.

    start        prompt position of the first row
    rows, columns  number of squares in each direction; each square is one row of the prompt
    digest       SHA-256 of the pixels, their size and the rules
    pixels       8 bits each of red, green and blue, line by line
    has_ends     each line of rows is followed by one more token, which is not a row
    is_whole     each row attends to the whole image, including later rows
    """

    start: int
    rows: int
    columns: int
    digest: bytes
    pixels: bytes
    has_ends: bool = False
    is_whole: bool = False

    @classmethod
    def of(cls, rules: ImageRules, size: Size, pixels: bytes) -> PromptImage:
        """Return the image for pixels that were resized to ``size``. The caller sets ``start`` later."""
        digest = hashlib.sha256(f"octavo image\0{rules}\0{size}\0".encode() + pixels).digest()
        rows, columns = size.height // rules.side, size.width // rules.side
        return cls(0, rows, columns, digest, pixels, bool(rules.line_ends), rules.is_whole)

    @property
    def length(self) -> int:
        """Number of prompt positions that the image takes."""
        return self.rows * (self.columns + self.has_ends)

    @property
    def num_rows(self) -> int:
        return self.rows * self.columns

    @property
    def span(self) -> MediaSpan:
        return MediaSpan(self.start, self.length, self.digest, self.is_whole)
