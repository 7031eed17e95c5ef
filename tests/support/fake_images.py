"""A vision part without a model: features contain the image and the row."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.engine.api.image import ImageRules, PromptImage
from octavo.engine.executor.base import EncodedImage

RULES = ImageRules(
    token=ord("~"), mark="~", patch=16, temporal=2, merge=2, min_pixels=1024, max_pixels=2**20,
    mean=(0.5,) * 3, std=(0.5,) * 3,
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '~' if p.type == 'image' else p.text }}{% endfor %}{% endif %}|{% endfor %}"
)


@dataclass
class FakeImages:
    has_axes: bool = True
    rules: ImageRules = RULES
    encoded: list[bytes] = field(default_factory=list)
    num_portions: int = 1
    max_kept: int = 99
    portion: Callable[[bytes], None] = lambda _: None
    kept: dict[bytes, EncodedImage] = field(default_factory=dict)
    done: Counter[bytes] = field(default_factory=Counter)

    def find(self, digest: bytes) -> EncodedImage | None:
        return self.kept.get(digest)

    def advance(self, image: PromptImage) -> EncodedImage | None:
        self.portion(image.digest)
        self.done[image.digest] += 1
        if self.done[image.digest] < self.num_portions:
            return None
        del self.done[image.digest]
        self.encoded.append(image.digest)
        self.kept[image.digest] = self.rows(image)
        while len(self.kept) > self.max_kept:
            del self.kept[next(iter(self.kept))]
        return self.kept[image.digest]

    @staticmethod
    def rows(image: PromptImage) -> EncodedImage:
        rows = image.digest[0] + np.arange(image.length, dtype=np.float32)[:, None] / 100
        return EncodedImage(np.tile(rows, (1, 4)), np.tile(rows[:, None], (1, 2, 4)))


def png(colour: str, width: int = 96, height: int = 64) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def bomb(side: int) -> bytes:
    """Return a small PNG with a header that claims side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    lines = zlib.compress(bytes(2**20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


def patches_of(pixels: npt.NDArray[Any], rules: ImageRules) -> npt.NDArray[Any]:
    """Return the patches of an image in the order of Qwen's processors, one by one."""
    merge, patch, side = rules.merge, rules.patch, rules.side
    squares = [
        pixels[top : top + side, left : left + side]
        for top in range(0, pixels.shape[0], side)
        for left in range(0, pixels.shape[1], side)
    ]
    patches = [
        square[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        for square in squares
        for row in range(merge)
        for column in range(merge)
    ]
    return np.stack(
        [np.stack([each.transpose(2, 0, 1)] * rules.temporal, axis=1).reshape(-1) for each in patches]
    )


def grid_of(rules: ImageRules, *images: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.array([(1, each.shape[0] // rules.patch, each.shape[1] // rules.patch) for each in images])


def data_url(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()
