"""Encoding of images for a loaded model, with a cache of encoded images."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from mlx.nn.layers.base import Module

from ...api.config import EngineConfig
from ...api.image import ImageRules, PromptImage
from ...memory.model_files import read_config
from ..row_inputs import RowInputs
from .language import adapt_language
from .tower import Encoded, Tower


class ImageEncoder:
    """Encodes images and caches the results by digest, least recently used first out beyond ``max_bytes``.
    Call it only on the engine's thread, between two steps. ``has_axes``: positions have three axes."""

    def __init__(self, tower: Tower, *, has_axes: bool, max_bytes: int) -> None:
        self._tower, self._max_bytes = tower, max_bytes
        self._kept: OrderedDict[bytes, Encoded] = OrderedDict()
        self.has_axes = has_axes
        self.num_encoded = 0
        self.nbytes = tower.nbytes

    def encode(self, image: PromptImage) -> Encoded:
        """Return an image's rows, from the cache if possible."""
        encoded = self._kept.get(image.digest)
        if encoded is None:
            encoded = self._kept[image.digest] = self._tower.encode(image)
            self.num_encoded += 1
        self._kept.move_to_end(image.digest)
        while sum(each.nbytes for each in self._kept.values()) > self._max_bytes and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return encoded


def load_encoder(
    config: EngineConfig, path: Path, model: Module, rows: RowInputs, rules: ImageRules
) -> ImageEncoder:
    """Read the vision part of the folder ``path``, and prepare the language model for its rows."""
    raw = read_config(path)
    text = raw.get("text_config") or raw
    tower = Tower(path, rules, width=text["hidden_size"])
    num_deepstack = len(raw["vision_config"].get("deepstack_visual_indexes") or ())
    has_axes = adapt_language(model, raw, rows, num_deepstack=num_deepstack)
    return ImageEncoder(tower, has_axes=has_axes, max_bytes=config.vision_cache)
