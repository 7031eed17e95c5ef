"""A vision part without a model: features contain the image and the row."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from typing import NamedTuple

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


class Rows(NamedTuple):
    features: npt.NDArray[np.float32]
    deepstack: npt.NDArray[np.float32] | None


@dataclass
class FakeImages:
    has_axes: bool = True
    rules: ImageRules = RULES
    encoded: list[bytes] = field(default_factory=list)

    def encode(self, image: PromptImage) -> EncodedImage:
        self.encoded.append(image.digest)
        rows = image.digest[0] + np.arange(image.length, dtype=np.float32)[:, None] / 100
        return Rows(np.tile(rows, (1, 4)), np.tile(rows[:, None], (1, 2, 4)))


def png(colour: str, width: int = 96, height: int = 64) -> bytes:
    """Return a PNG of one colour."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def data_url(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()
