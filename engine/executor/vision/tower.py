"""The vision part of a model, computed by mlx-vlm: images in, rows of the language model out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from ...api.errors import ModelLoadError
from ...api.image import ImageRules, PromptImage

Floats = npt.NDArray[np.float32]


class Encoded(NamedTuple):
    """An encoded image.

    features   [n, D], embeddings of its rows
    deepstack  [n, L, D], added after each of the first L layers; None: the model has none
    """

    features: Floats
    deepstack: Floats | None

    @property
    def nbytes(self) -> int:
        return self.features.nbytes + (0 if self.deepstack is None else self.deepstack.nbytes)


class Tower:
    """Encodes images, one at a time. The language part of mlx-vlm's model is dropped before its weights are
    read. ``width``: hidden size of the language model."""

    def __init__(self, path: Path, rules: ImageRules, *, width: int) -> None:
        """Read the weights; ModelLoadError if mlx-vlm is missing or cannot load them."""
        load = _mlx_vlm_loader()
        try:
            self._model = load(path, lazy=True)
            self._model.language_model = SimpleNamespace(
                model=SimpleNamespace(embed_tokens=lambda ids: mx.zeros((*ids.shape, width))),
                get_rope_index=lambda *_, **__: (None, None),  # computed elsewhere, for whole prompts
            )
            self._model.eval()
            weights = dict(tree_flatten(self._model.parameters())).values()
            mx.eval(*weights)
        except Exception as error:  # mlx-vlm's code can raise anything
            why = " ".join(str(error).split())[:300] or type(error).__name__
            raise ModelLoadError(
                f"mlx-vlm cannot load the vision part of {path}: {why}; serve it without vision"
            ) from error
        self._rules = rules
        self.nbytes = sum(weight.nbytes for weight in weights)

    def encode(self, image: PromptImage) -> Encoded:
        """Return an image's rows. mlx-vlm's ``get_input_embeddings`` computes them for a prompt that consists
        of the image alone, because all of its models share only this interface."""
        rules, height, width = self._rules, image.rows * self._rules.side, image.columns * self._rules.side
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(height, width, 3)
        ids = mx.full((1, image.length), rules.token, mx.int32)
        grid = mx.array([[1, height // rules.patch, width // rules.patch]])
        found = self._model.get_input_embeddings(
            ids, mx.array(patches(rules, pixels)), mask=mx.ones_like(ids), image_grid_thw=grid
        )
        features = np.array(found.inputs_embeds[0].astype(mx.float32))
        deepstack = found.deepstack_visual_embeds
        if deepstack is None:
            return Encoded(features, None)
        layers = [np.array(layer.astype(mx.float32)) for layer in deepstack]
        return Encoded(features, np.stack(layers, axis=1) if layers else None)


def patches(rules: ImageRules, pixels: npt.NDArray[np.uint8]) -> Floats:
    """Return normalized patches of pixels [H, W, 3] in the order of Qwen's processors. The shape is [(H /
    patch) (W / patch), 3 temporal patch patch]; patches of a merged square are adjacent."""
    patch, merge = rules.patch, rules.merge
    height, width = pixels.shape[0] // rules.side, pixels.shape[1] // rules.side
    scaled = pixels.astype(np.float32) * np.float32(1 / 255)
    values = (scaled - np.array(rules.mean, np.float32)) / np.array(rules.std, np.float32)
    squares = values.reshape(height, merge, patch, width, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    repeated = np.repeat(squares[:, :, :, :, :, None], rules.temporal, axis=5)
    return np.ascontiguousarray(repeated.reshape(height * width * merge**2, -1))


def _mlx_vlm_loader() -> Callable[..., Any]:
    try:
        from mlx_vlm.utils import load_model
    except ImportError as error:
        raise ModelLoadError(
            f"vision needs mlx-vlm, which cannot be imported ({error}); pip install 'octavo[vision]'"
        ) from error
    loader: Callable[..., Any] = load_model
    return loader
