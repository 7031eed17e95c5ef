from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

from octavo.block_manager import MediaSpan

from .errors import InvalidRequest

MAX_ASPECT = 200  # longest allowed ratio of the sides, as in Qwen's processor


class Size(NamedTuple):
    """Height and width in pixels."""

    height: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """Preprocessing of images for one model.

    token                    id of the placeholder token in prompts
    patch                    side of a patch, in pixels
    merge                    patches along each side of an image token
    fit                      method of resizing: "area", "edge", "fill", "square" or "crop"
    edge                     longest allowed side, in pixels
    min_pixels, max_pixels   range of the resized image's area, in pixels
    resample                 number of Pillow's resampling filter
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
    is_bidirectional: bool = False
    temporal: int = 1
    fit: str = "area"
    edge: int = 0
    min_pixels: int = 1
    resample: int = 3

    @property
    def side(self) -> int:
        return self.patch * self.merge

    def size_for(self, size: Size) -> Size:
        """Return the size after resizing. Raises InvalidRequest if the sides differ too much."""
        aspect = max(size) / min(size)
        if aspect > MAX_ASPECT:
            raise InvalidRequest(
                f"a picture's longer side must be at most {MAX_ASPECT} times the shorter one, got "
                f"{size.width} x {size.height} pixels; crop the picture"
            )
        side, area = self.side, size.height * size.width
        if self.fit in ("square", "crop"):
            return Size(self.edge, self.edge)
        if self.fit == "fill":
            scale, longest = math.sqrt(self.max_pixels / area), self.max_pixels // side**2
            tall, wide = (math.floor(scale * each / side) for each in size)
            if not tall:
                tall, wide = 1, min(size.width // size.height, longest)
            elif not wide:
                tall, wide = min(size.height // size.width, longest), 1
            return Size(tall * side, wide * side)
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


class Tensor(NamedTuple):
    values: bytes
    shape: tuple[int, ...]
    dtype: str


class ImageTensors(NamedTuple):
    """Images that a router or client has resized.

    grids    [images, 3], number of patches in time, height and width
    places   position of the first token and number of tokens, for each image in a prompt of token ids
    """

    pixels: Tensor
    grids: Tensor | None
    places: tuple[tuple[int, int], ...] = ()


class PromptImage(NamedTuple):
    """An image of a prompt.

    rows, columns  number of image tokens in each direction
    digest         SHA-256 of the pixels, their size and the preprocessing
    pixels         RGB, 8 bits per channel, line by line
    """

    start: int
    rows: int
    columns: int
    digest: bytes
    pixels: bytes
    has_ends: bool = False
    is_bidirectional: bool = False

    @classmethod
    def of(cls, rules: ImageRules, size: Size, pixels: bytes) -> PromptImage:
        digest = hashlib.sha256(f"octavo image\0{rules}\0{size}\0".encode() + pixels).digest()
        rows, columns = size.height // rules.side, size.width // rules.side
        return cls(0, rows, columns, digest, pixels, bool(rules.line_ends), rules.is_bidirectional)

    @property
    def length(self) -> int:
        return self.rows * (self.columns + self.has_ends)

    @property
    def num_rows(self) -> int:
        return self.rows * self.columns

    @property
    def span(self) -> MediaSpan:
        return MediaSpan(self.start, self.length, self.digest, self.is_bidirectional)
