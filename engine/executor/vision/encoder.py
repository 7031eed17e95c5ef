from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from ...api.config import EngineConfig
from ...api.errors import ModelLoadError
from ...api.image import ImageRules, PromptImage
from ...memory.model_files import read_config
from ..base import EncodedImage
from ..mlx_lm_import import ROPES
from ..model_ops import ModelOps
from ..overrides import adapt_module
from ..row_inputs import RowInputs
from .families import FAMILIES, tensors_of
from .portions import Portions, cut, modules_to_cut, record_models, use_linear_patches

IS_IMAGE = "image_rows"  # int32 [T], 1 for image rows
FEATURES = "image_features"  # float32 [T, D], embeddings of image rows
DEEPSTACK = "image_deepstack"  # float32 [T, L, D], added to the outputs of the first L layers
CACHE_BYTES = 256 << 20

POSITIONS = ("position_t", "position_h", "position_w")  # int32 [T] each, for M-RoPE


def adapt_language(model: Module, config: Mapping[str, Any], rows: RowInputs) -> bool:
    """Let ``model`` read image rows; return whether positions have three axes. Raises ModelLoadError."""
    embeddings = [module for path, module in model.named_modules() if path.endswith("embed_tokens")]
    layers: list[Any] = list(model.layers)
    num_deepstack = len(config["vision_config"].get("deepstack_visual_indexes") or ())
    if len(embeddings) != 1 or num_deepstack >= len(layers):
        raise ModelLoadError(
            f"a model with images must have one embed_tokens and more than {num_deepstack} layers, got "
            f"{len(embeddings)} and {len(layers)}; serve the model without vision"
        )
    adapt_module(embeddings[0], _embedding, image_inputs=rows)
    for path, module in model.named_modules():
        if path.endswith("embed_tokens_per_layer"):
            adapt_module(module, _layer_embedding, image_inputs=rows)
    own = ((index, layer) for index, layer in enumerate(layers[:num_deepstack]) if isinstance(layer, Module))
    for index, layer in own:
        adapt_module(layer, _layer, image_inputs=rows, deepstack_index=index)
    section = rope_settings(config).get("mrope_section")
    if section is None:
        return False
    axes = axes_of_pairs(section, interleaved=bool(rope_settings(config).get("mrope_interleaved")))
    ropes: list[Any] = [module for _, module in model.named_modules() if isinstance(module, ROPES)]
    for module in ropes:
        adapt_module(module, _rope, image_inputs=rows, axis_of_value=mx.array(axes * 2, mx.int32))
    return True


def rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for part in (config.get("text_config") or {}, config):
        for name in ("rope_parameters", "rope_scaling"):
            if part.get(name):
                found: Mapping[str, Any] = part[name]
                return found
    return {}


def axes_of_pairs(section: list[int], *, interleaved: bool) -> list[int]:
    """Return the axis (time, height or width) of each rotated pair of values.

    Qwen2-VL's sections follow each other; Qwen3-VL's are interleaved (t h w t h w ... t).
    """
    if not interleaved:
        return [axis for axis, count in enumerate(section) for _ in range(count)]
    axes = [0] * sum(section)
    for axis in (1, 2):
        for pair in range(axis, 3 * section[axis], 3):
            axes[pair] = axis
    return axes


def _of_images(rows: RowInputs, values: mx.array, others: mx.array) -> mx.array:
    mask = rows.get(IS_IMAGE)
    assert mask is not None, "a step with features says which rows they are for"
    return mx.where(mask[:, None, None] > 0, values[:, None].astype(others.dtype), others)


def _embedding(kind: Any) -> dict[str, Any]:
    def __call__(self: Any, ids: mx.array) -> mx.array:
        hidden: mx.array = kind.__call__(self, ids)
        features = self.image_inputs.get(FEATURES)
        return hidden if features is None else _of_images(self.image_inputs, features, hidden)

    return {"__call__": __call__}


def _layer_embedding(kind: Any) -> dict[str, Any]:
    """Return methods for Gemma's per-layer embedding, which treat image rows as padding tokens."""

    def __call__(self: Any, ids: mx.array) -> mx.array:
        if (mask := self.image_inputs.get(IS_IMAGE)) is not None:
            ids = mx.where(mask[:, None] > 0, 0, ids)
        hidden: mx.array = kind.__call__(self, ids)
        return hidden

    return {"__call__": __call__}


def _layer(kind: Any) -> dict[str, Any]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        out: mx.array = kind.__call__(self, *args, **kwargs)
        deepstack = self.image_inputs.get(DEEPSTACK)
        if deepstack is None:
            return out
        added = out.squeeze(1) + deepstack[:, self.deepstack_index].astype(out.dtype)
        return _of_images(self.image_inputs, added, out)

    return {"__call__": __call__}


def _rope(kind: Any) -> dict[str, Any]:
    def __call__(self: Any, x: mx.array, offset: Any = 0, **more: Any) -> mx.array:
        positions = [self.image_inputs.get(name) for name in POSITIONS]
        if positions[0] is None:
            text: mx.array = kind.__call__(self, x, offset, **more)
            return text
        # Text rows are rotated as without images, so their results are bit-identical.
        t, h, w = (kind.__call__(self, x, position, **more) for position in positions)
        axis = self.axis_of_value
        if axis.size < x.shape[-1]:
            axis = mx.concatenate([axis, mx.zeros(x.shape[-1] - axis.size, mx.int32)])
        turned: mx.array = mx.where(axis == 0, t, mx.where(axis == 1, h, w))
        return turned

    return {"__call__": __call__}


class Tower:
    """Vision part of a model, which encodes one image at a time."""

    def __init__(
        self,
        path: Path,
        family: str,
        rules: ImageRules,
        *,
        width: int,
        ops: ModelOps,
        exact: bool = False,
    ) -> None:
        """Read the weights. Raises ModelLoadError."""
        load = _mlx_vlm_loader()
        try:
            self.model = load(path, lazy=True)
            language = SimpleNamespace(
                embed_tokens=lambda ids: mx.zeros((*ids.shape, width)),
                embed_scale=1.0,
                hidden_size_per_layer_input=0,
                get_rope_index=lambda *_, **__: (None, None),
            )
            language.model = self.model.language_model = language
            self.model.audio_tower = self.model.embed_audio = None
            self.model.eval()
            weights = dict(tree_flatten(self.model.parameters())).values()
            mx.eval(*weights)
            record_models()
        except Exception as error:  # mlx-vlm's code can raise anything
            why = " ".join(str(error).split())[:300] or type(error).__name__
            raise ModelLoadError(
                f"mlx-vlm cannot load the vision part of {path}: {why}; serve the model without vision"
            ) from error
        self._family, self._rules = family, rules
        self.nbytes = sum(weight.nbytes for weight in weights)
        use_linear_patches(self.model)
        modules = modules_to_cut(self.model)
        self._portions = Portions(ops.prepare_tower(self.model, exact=exact))
        for module, num_rows in modules:
            cut(module, num_rows, self._portions.results)

    def encode(self, image: PromptImage) -> Generator[None, None, EncodedImage]:
        """Compute an image's rows in portions; yield between portions.

        Results are bit-identical to a single evaluation.
        """
        rules, height, width = self._rules, image.rows * self._rules.side, image.columns * self._rules.side
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(height, width, 3)
        ids = mx.full((1, image.num_rows), rules.token, mx.int32)
        values, tensors = tensors_of(self._family, rules, pixels)
        yield
        with self._portions.recording() as results:
            found = self.model.get_input_embeddings(ids, mx.array(values), mask=mx.ones_like(ids), **tensors)
            deepstack = found.deepstack_visual_embeds
            outputs = deque((*results, *(deepstack or ())))
            results.clear()
        while outputs:
            yield
            mx.eval(outputs.popleft())  # so that MLX can free what it was computed from
        yield
        features = np.array(found.inputs_embeds[0].astype(mx.float32))
        if FAMILIES[self._family].scales:
            features /= np.float32(features.shape[-1] ** 0.5)
        if image.has_ends:
            lines = features.reshape(image.rows, image.columns, -1)
            features = np.pad(lines, ((0, 0), (0, 1), (0, 0))).reshape(image.length, -1)
        if deepstack is None:
            return EncodedImage(features, None)
        layers = [np.array(layer.astype(mx.float32)) for layer in deepstack]
        return EncodedImage(features, np.stack(layers, axis=1) if layers else None)


def _mlx_vlm_loader() -> Callable[..., Any]:
    try:
        from mlx_vlm.utils import load_model
    except ImportError as error:
        raise ModelLoadError(
            f"vision needs mlx-vlm, which cannot be imported ({error}); pip install '.[vision]'"
        ) from error
    loader: Callable[..., Any] = load_model
    return loader


class ImageEncoder:
    """Encoder of images, with a cache of ``CACHE_BYTES``. Used only on the engine's thread."""

    def __init__(self, tower: Tower, *, has_axes: bool) -> None:
        self._tower = tower
        self._kept: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self._begun: tuple[bytes, Generator[None, None, EncodedImage]] | None = None
        self.has_axes = has_axes
        self.num_encoded = 0
        self.nbytes = tower.nbytes

    def find(self, digest: bytes) -> EncodedImage | None:
        if (encoded := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
        return encoded

    def advance(self, image: PromptImage) -> EncodedImage | None:
        """Compute the next portion of an image; return its rows after the last portion."""
        if self._begun is None or self._begun[0] != image.digest:
            self._begun = image.digest, self._tower.encode(image)
        try:
            next(self._begun[1])
        except StopIteration as done:
            encoded: EncodedImage = done.value
        else:
            return None
        self._begun = None
        self.num_encoded += 1
        self._kept[image.digest] = encoded
        while sum(each.nbytes for each in self._kept.values()) > CACHE_BYTES and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return encoded


def load_encoder(
    config: EngineConfig, path: Path, rules: ImageRules, ops: ModelOps, *, has_axes: bool
) -> ImageEncoder:
    raw = read_config(path)
    text = raw.get("text_config") or raw
    tower = Tower(path, raw["model_type"], rules, width=text["hidden_size"], ops=ops, exact=config.exact)
    return ImageEncoder(tower, has_axes=has_axes)
