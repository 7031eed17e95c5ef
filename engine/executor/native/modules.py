"""Put native kernels into a loaded model, by the type of its modules, never by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm, RMSNorm
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from octavo.kernels import _ext

from . import linear as native
from . import rope
from .activations import FLOATS, replace_activations
from .merged import Merged, MergedLinear, MergedQuantizedLinear, Observed
from .norms import (
    NativeGatedRMSNorm,
    NativeLayerNorm,
    NativeRMSNorm,
    NativeShiftedRMSNorm,
    gate_of_rms_norm,
    is_shifted_rms_norm,
)

NOTHING = Observed()


@dataclass(frozen=True, slots=True)
class Kept:
    """A module with parameters that stays MLX's own, and why."""

    name: str
    type: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a model's modules.

    replaced   number of modules made native, by the name of their MLX type
    kept       the modules with parameters of their own that stay MLX's
    functions  names of functions of mlx and mlx-lm that run natively from now on
    merged     how many groups of linear layers became one, by the last parts of their names
    apart      groups that were not merged, and why
    num_bytes  bytes of packed weights, which are not among ``model.parameters()`` any more
    """

    replaced: dict[str, int]
    kept: tuple[Kept, ...]
    functions: tuple[str, ...]
    merged: dict[str, int]
    apart: tuple[Kept, ...]
    num_bytes: int


def replace_modules(model: Module, *, exact: bool, fuse: bool, observed: Observed = NOTHING) -> Report:
    """Make the linear layers, experts, tied heads and RMS norms of ``model`` native, in place.

    Call it on the thread that will evaluate the model, after loading. Weights are evaluated,
    packed and released one layer at a time, so that a lazily loaded model is never held twice.

    exact  refuse the kernels that round activations below the precision they come in: to 8
           or 16 bits before quantized weights (AVX2, AVX-512), fp16 ones to bf16 (AVX-512, AMX)
    fuse   let norms take over the addition before them, and rotary embeddings the norm; results
           stay the same to the bit
    observed  what a forward calls: layers on one input become one, and embeddings that are heads are
           packed first, while nothing else is in memory; others when their head is first used

    Activation functions become native for every model of this process.
    """
    replaced: Counter[str] = Counter()
    kept: list[Kept] = []
    for head in observed.heads:
        kind = type(head)
        if _RULES[kind](head, exact) is None:
            replaced[kind.__name__] += 1
            head.pack()
    merged, apart = _merge(model, observed.groups, exact, replaced)
    for name, module in model.named_modules():
        kind = type(module)
        rule = _RULES.get(kind) or _rule_by_behaviour(module)
        if rule is None:
            if _has_own_arrays(module) and not isinstance(module, _NATIVE):
                kept.append(Kept(name, kind.__name__, "no native kernel for this type"))
            continue
        reason = rule(module, exact)
        if reason is None:
            if hasattr(module, "fuse"):
                module.fuse = fuse
            replaced[kind.__name__] += 1
        else:
            kept.append(Kept(name, kind.__name__, reason))
    functions = replace_activations()
    return Report(dict(replaced), tuple(kept), functions, merged, apart, packed_bytes(model))


def set_fused(model: Module, on: bool) -> None:
    """Whether modules take over operations of others. Off, merged layers compute apart, each from
    all of their weights: slow, to compare with."""
    for _, module in model.named_modules():
        if isinstance(module, MergedLinear | MergedQuantizedLinear):
            module.merged.together = on
        elif hasattr(module, "fuse"):
            module.fuse = on


def unfuse(model: Module) -> None:
    """Undo what fuses operations of different modules: each computes for itself from now on."""
    set_fused(model, False)
    for _, module in model.named_modules():
        if isinstance(module, MergedLinear | MergedQuantizedLinear):
            module.restore()


def _merge(
    model: Module, groups: Sequence[Sequence[Module]], exact: bool, replaced: Counter[str]
) -> tuple[dict[str, int], tuple[Kept, ...]]:
    """Make groups of linear layers native and merge them, where all of a group can be."""
    names = {id(module): name for name, module in model.named_modules()}
    merged: Counter[str] = Counter()
    apart: list[Kept] = []
    for group in groups:
        label = " + ".join(names[id(module)].rpartition(".")[2] for module in group)
        kind = type(group[0])
        reason_of, ours = _MERGEABLE[kind]
        reason = next((reason for module in group if (reason := reason_of(module)) is not None), None)
        if reason is not None:
            apart.append(Kept(label, kind.__name__, reason))
            continue
        for module in group:
            _become(module, ours, exact)
        Merged(group)
        replaced[kind.__name__] += len(group)
        merged[label] += 1
    return dict(merged), tuple(apart)


def packed_bytes(model: Module) -> int:
    """Bytes of the model's packed weights (embeddings are packed when their head is first used)."""
    packed = {id(w): w for _, module in model.named_modules() if (w := getattr(module, "packed", None))}
    return sum(
        weight.nbytes
        for weight in packed.values()
        if isinstance(weight, _ext.PackedWeight | _ext.PackedExperts)
    )


def _has_own_arrays(module: Module) -> bool:
    return any(isinstance(value, mx.array) for value in module.values())


def _become(module: Any, kind: type, exact: bool) -> None:
    module.__class__ = kind
    module.packed = None
    module.exact = exact


# A rule makes a module native, or says why it cannot.


def _replace_linear(module: Any, exact: bool) -> str | None:
    reason = _dense_reason(module["weight"])
    if reason is None:
        _become(module, native.NativeLinear, exact)
        module.pack()
    return reason


def _replace_quantized_linear(module: Any, exact: bool) -> str | None:
    reason = native.quantized_reason(module)
    if reason is None:
        _become(module, native.NativeQuantizedLinear, exact)
        module.pack()
    return reason


def _replace_switch_linear(module: Any, exact: bool) -> str | None:
    reason = _dense_reason(module["weight"], num_dims=3)
    if reason is None:
        _become(module, native.NativeSwitchLinear, exact)
        module.pack()
    return reason


def _replace_quantized_switch_linear(module: Any, exact: bool) -> str | None:
    reason = native.quantized_reason(module, num_dims=3)
    if reason is None:
        _become(module, native.NativeQuantizedSwitchLinear, exact)
        module.pack()
    return reason


def _replace_embedding(module: Any, exact: bool) -> str | None:
    reason = _dense_reason(module["weight"])
    if reason is None:
        _become(module, native.NativeEmbedding, exact)
    return reason


def _replace_quantized_embedding(module: Any, exact: bool) -> str | None:
    reason = native.quantized_reason(module)
    if reason is None:
        _become(module, native.NativeQuantizedEmbedding, exact)
    return reason


def _replace_norm(module: Any, _exact: bool) -> str | None:
    for name in ("weight", "bias"):
        if name in module and module[name].dtype not in FLOATS:
            return f"{name} in {module[name].dtype}"
    module.__class__ = NativeRMSNorm if type(module) is RMSNorm else NativeLayerNorm
    module.fuse = False
    return None


def _replace_shifted_norm(module: Any, _exact: bool) -> str | None:
    module.__class__ = NativeShiftedRMSNorm
    module.fuse = False
    return None


def _replace_gated_norm(module: Any, gate_first: bool) -> str | None:
    module.plain, module.gate_first, module.fuse = type(module), gate_first, False
    module.__class__ = NativeGatedRMSNorm
    return None


def _rule_by_behaviour(module: Any) -> Callable[[Any, bool], str | None] | None:
    """For norms that model files define for themselves."""
    if is_shifted_rms_norm(module):
        return _replace_shifted_norm
    gate_first = gate_of_rms_norm(module)
    if gate_first is None:
        return None
    return lambda norm, _exact: _replace_gated_norm(norm, gate_first)


def _replace_rope(module: Any, _exact: bool) -> str | None:
    rotation = rope.rotation_of(module)
    if rotation.dims < 2 or rotation.dims % 2:
        return f"rotates {rotation.dims} dimensions"
    module.__class__ = rope.NATIVE[type(module)]
    module.rotation = rotation
    module.fuse = False
    return None


_RULES: dict[type, Callable[[Any, bool], str | None]] = {
    Linear: _replace_linear,
    QuantizedLinear: _replace_quantized_linear,
    Embedding: _replace_embedding,
    QuantizedEmbedding: _replace_quantized_embedding,
    RMSNorm: _replace_norm,
    LayerNorm: _replace_norm,
    SwitchLinear: _replace_switch_linear,
    QuantizedSwitchLinear: _replace_quantized_switch_linear,
} | dict.fromkeys(rope.NATIVE, _replace_rope)
_NATIVE = (
    native.NativeLinear,
    native.NativeQuantizedLinear,
    native.NativeEmbedding,
    native.NativeQuantizedEmbedding,
    NativeRMSNorm,
    NativeLayerNorm,
    NativeShiftedRMSNorm,
    NativeGatedRMSNorm,
    native.NativeSwitchLinear,
    native.NativeQuantizedSwitchLinear,
)


def _dense_reason(weight: mx.array, num_dims: int = 2) -> str | None:
    if weight.ndim != num_dims or weight.size == 0:
        return f"weight of shape {list(weight.shape)}, not a matrix{' per expert' * (num_dims == 3)}"
    return None if weight.dtype in FLOATS else f"weight in {weight.dtype}"


def _linear_reason(module: Any) -> str | None:
    return _dense_reason(module["weight"])


_MERGEABLE: dict[type, tuple[Callable[[Any], str | None], type]] = {
    Linear: (_linear_reason, native.NativeLinear),
    QuantizedLinear: (native.quantized_reason, native.NativeQuantizedLinear),
}
