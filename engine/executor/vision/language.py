"""Image rows in the language model: their embeddings, positions and deepstack, from named inputs.

Once the model is ready, its modules are adapted in place: an object gets a subclass of its class. Without
these inputs a step computes as before, and text rows have the same bits with and without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models import rope_utils

from ...api.errors import ModelLoadError
from ..row_inputs import RowInputs

IS_IMAGE = "image_rows"  # int32 [T], 1 for image rows
FEATURES = "image_features"  # float32 [T, D], embeddings of image rows
DEEPSTACK = "image_deepstack"  # float32 [T, L, D], added behind layers
_ROPES = (
    RoPE,
    rope_utils.Llama3RoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.YarnRoPE,
    rope_utils.ProportionalRoPE,
)
POSITIONS = ("position_t", "position_h", "position_w")  # int32 [T] each, for M-RoPE


def adapt_language(model: Module, config: Mapping[str, Any], rows: RowInputs, *, num_deepstack: int) -> bool:
    """Let ``model`` read the inputs of ``rows``; return whether positions have three axes. Raises
    ModelLoadError for a model that lacks the necessary modules."""
    embeddings = [module for path, module in model.named_modules() if path.endswith("embed_tokens")]
    layers: list[Any] = list(model.layers)
    if len(embeddings) != 1 or num_deepstack >= len(layers):
        raise ModelLoadError(
            f"a model with images must have one embed_tokens and more than {num_deepstack} layers, got "
            f"{len(embeddings)} and {len(layers)}; serve it without vision"
        )
    _adapt(embeddings[0], rows, _embedding)
    for index, layer in enumerate(layers[:num_deepstack]):
        object.__setattr__(layer, "deepstack_index", index)
        _adapt(layer, rows, _layer)
    section = rope_settings(config).get("mrope_section")
    if section is None:
        return False
    axes = axes_of_pairs(section, interleaved=bool(rope_settings(config).get("mrope_interleaved")))
    ropes: list[Any] = [module for _, module in model.named_modules() if isinstance(module, _ROPES)]
    for module in ropes:
        object.__setattr__(module, "axis_of_value", mx.array(axes * 2, mx.int32))
        _adapt(module, rows, _rope)
    return True


def rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of rotary embeddings, which checkpoints store under two names in two places."""
    for part in (config.get("text_config") or {}, config):
        for name in ("rope_parameters", "rope_scaling"):
            if part.get(name):
                found: Mapping[str, Any] = part[name]
                return found
    return {}


def axes_of_pairs(section: list[int], *, interleaved: bool) -> list[int]:
    """Return the axis (time, height or width) that rotates each pair of values. Qwen2-VL's sections follow
    one another; Qwen3-VL's are interleaved (t h w t h w ... t)."""
    if not interleaved:
        return [axis for axis, count in enumerate(section) for _ in range(count)]
    axes = [0] * sum(section)
    for axis in (1, 2):
        for pair in range(axis, 3 * section[axis], 3):
            axes[pair] = axis
    return axes


_CLASSES: dict[tuple[type, Any], type] = {}


def _adapt(module: Any, rows: RowInputs, make: Any) -> None:
    kind = type(module)
    object.__setattr__(module, "image_inputs", rows)
    if (kind, make) not in _CLASSES:
        _CLASSES[kind, make] = type(kind.__name__, (kind,), make(kind))
    module.__class__ = _CLASSES[kind, make]


def _of_images(rows: RowInputs, values: mx.array, others: mx.array) -> mx.array:
    """Return ``values`` [T, D] in image rows and ``others`` [T, 1, D] in text rows."""
    mask = rows.get(IS_IMAGE)
    assert mask is not None, "a step with features says which rows they are for"
    return mx.where(mask[:, None, None] > 0, values[:, None].astype(others.dtype), others)


def _embedding(kind: Any) -> dict[str, Any]:
    def __call__(self: Any, ids: mx.array) -> mx.array:
        hidden: mx.array = kind.__call__(self, ids)
        features = self.image_inputs.get(FEATURES)
        return hidden if features is None else _of_images(self.image_inputs, features, hidden)

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
        # One rotation for each axis, computed as for text, so text rows keep their bits.
        t, h, w = (kind.__call__(self, x, position, **more) for position in positions)
        axis = self.axis_of_value
        if axis.size < x.shape[-1]:  # later values are not rotated
            axis = mx.concatenate([axis, mx.zeros(x.shape[-1] - axis.size, mx.int32)])
        turned: mx.array = mx.where(axis == 0, t, mx.where(axis == 1, h, w))
        return turned

    return {"__call__": __call__}
