"""Images of a prompt: the data that cross from the front end to the engine."""

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
    """Rules for turning an image into rows of a prompt, for one model.

    token                    id of the placeholder for each row of an image
    mark                     what the chat template writes once for each image
    text                     what takes the mark's place, with one placeholder; "": the mark is one
    line_ends                ids behind each line of rows, and behind the last line; empty: none
    is_whole                 rows of an image see the whole image
    patch, temporal, merge   pixels of a patch's side, repetitions of a patch, and patches of a row's side
    fit                      "area": whole squares, min_pixels to max_pixels in all; "edge": sides up to
                             ``edge`` too, and small images grow to whole squares alone; "square":
                             ``edge`` x ``edge`` pixels; "crop": the middle of a picture, of that size
    min_pixels, max_pixels   pixels of a resized image
    resample                 Pillow's number of the filter for resizing
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
        """Side, in pixels, of the square of the image that one row represents."""
        return self.patch * self.merge

    def size_for(self, size: Size) -> Size:
        """Return the size to which an image is resized, as by the model's own processor. It has whole
        squares, an allowed number of pixels, and about the same aspect ratio. Raises InvalidRequest if
        the ratio is too large."""
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

    start        position of its first row
    rows, columns  size in squares, each of which is one row of the prompt
    digest       SHA-256 of the pixels, their size and the rules
    pixels       8 bits each of red, green and blue, line by line
    has_ends     each line of rows has one more token at its end, which is not a row
    is_whole     rows see the whole image, the later rows too
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
        """Return the image for pixels that were resized to ``size``; its start is set later."""
        digest = hashlib.sha256(f"octavo image\0{rules}\0{size}\0".encode() + pixels).digest()
        rows, columns = size.height // rules.side, size.width // rules.side
        return cls(0, rows, columns, digest, pixels, bool(rules.line_ends), rules.is_whole)

    @property
    def length(self) -> int:
        """Number of prompt positions that it takes."""
        return self.rows * (self.columns + self.has_ends)

    @property
    def num_rows(self) -> int:
        return self.rows * self.columns

    @property
    def span(self) -> MediaSpan:
        return MediaSpan(self.start, self.length, self.digest, self.is_whole)
