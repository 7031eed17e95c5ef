"""Native kernels for a loaded model, chosen by the types of its modules, never by its name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm, RMSNorm
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from octavo.kernels import _ext

from ..model_ops import Kept, Report
from . import linear as native
from . import rope
from .activations import FLOATS, replace_activations
from .comparison import Comparison, Expected
from .merged import Merged, MergedLinear, MergedQuantizedLinear, Observed
from .norms import (
    NativeGatedRMSNorm,
    NativeLayerNorm,
    NativeRMSNorm,
    NativeShiftedRMSNorm,
    NormKind,
    kind_of_norm,
)

NOTHING = Observed()


def replace_modules(
    model: Module,
    *,
    exact: bool,
    fuse: bool,
    observed: Observed = NOTHING,
    between: Callable[[], None] = lambda: None,
) -> Report:
    """Make the linear layers, experts, tied heads and RMS norms of ``model`` native, in place.

    Call it on the thread that will evaluate the model, after loading. Weights are evaluated, packed and
    released one layer at a time, so that a lazily loaded model is never in memory twice.

    exact     refuse kernels that round activations below their precision: to 8 or 16 bits before
              quantized weights (AVX2, AVX-512), or from fp16 to bf16 (AVX-512, AMX)
    fuse      let norms include the addition before them, and rotary embeddings the norm; results
              stay bit-identical
    observed  observed calls of a forward: layers with the same input are merged. Embeddings used as output
              heads are packed first, while nothing else is in memory
    between   called when layers with packed weights are native and the others are not yet

    Activation functions become native for every model of this process.

    Raises ModelLoadError for a module whose replacement computes other results.
    """
    work = _Replacement(model, exact, Comparison(observed.calls))
    work.pack_heads(observed.heads)
    _ext.release_kept()  # quantizing a head needs the largest buffer, which no layer needs
    work.merge(observed.groups)
    modules = list(model.named_modules())
    work.replace([each for each in modules if type(each[1]) in _PACKED], fuse=fuse)
    between()
    work.replace([each for each in modules if type(each[1]) not in _PACKED], fuse=fuse)
    functions = replace_activations()
    work.comparison.meet_functions(functions.items())
    work.comparison.check()
    return Report(
        dict(work.replaced),
        tuple(work.kept),
        tuple(functions),
        dict(work.merged),
        tuple(work.apart),
        packed_bytes(model),
    )


class _Replacement:
    """Progress of replacing the modules of one model."""

    def __init__(self, model: Module, exact: bool, comparison: Comparison) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._exact = exact
        self.comparison = comparison
        self.replaced: Counter[str] = Counter()
        self.kept: list[Kept] = []
        self.merged: Counter[str] = Counter()
        self.apart: list[Kept] = []

    def pack_heads(self, heads: Sequence[Module]) -> None:
        for head in heads:
            kind = type(head)
            rule = _PACKED[kind]
            if rule.reason_of(head, rule.num_dims) is None:
                (before,) = self.comparison.expect((self._names[id(head)], head))
                rule.put(head, self._exact)
                cast(Any, head).pack()
                self._meet(before, head, kind)

    def merge(self, groups: Sequence[Sequence[Module]]) -> None:
        """Make groups of linear layers native and merge each group whose layers all have a kernel."""
        for group in groups:
            label = " + ".join(self._names[id(module)].rpartition(".")[2] for module in group)
            kind = type(group[0])
            rule = _PACKED[kind]
            reasons = (rule.reason_of(module, rule.num_dims) for module in group)
            reason = next((reason for reason in reasons if reason is not None), None)
            if reason is not None:
                self.apart.append(Kept(label, kind.__name__, reason))
                continue
            before = self.comparison.expect(*((self._names[id(module)], module) for module in group))
            for module in group:
                rule.put(module, self._exact)
            Merged(group)
            self.merged[label] += 1
            for expected, module in zip(before, group, strict=True):
                self._meet(expected, module, kind)

    def replace(self, modules: Sequence[tuple[str, Any]], *, fuse: bool) -> None:
        """Make modules with a replacement rule native, one by one."""
        for name, module in modules:
            kind = type(module)
            rule = _RULES.get(kind) or _rule_by_source(module)
            if rule is None:
                if _has_own_arrays(module) and not isinstance(module, _NATIVE):
                    self.kept.append(Kept(name, kind.__name__, "no native kernel for this type"))
                continue
            reason = rule.reason_of(module, rule.num_dims) if isinstance(rule, _Packed) else None
            before = [] if reason else self.comparison.expect((name, module))
            reason = reason or rule(module, self._exact)
            if reason is not None:
                self.kept.append(Kept(name, kind.__name__, reason))
                continue
            self._meet(before[0], module, kind)
            if hasattr(module, "fuse"):
                module.fuse = fuse  # not compared here: equivalence_check.py compares whole fused steps

    def _meet(self, expected: Expected, module: Module, kind: type) -> None:
        self.replaced[kind.__name__] += 1
        self.comparison.meet(expected, module)


def replaceable(model: Module) -> set[type]:
    """Return the types of the model's modules that have native replacements."""
    return {
        type(module) for _, module in model.named_modules() if type(module) in _RULES or kind_of_norm(module)
    }


def set_fused(model: Module, on: bool) -> None:
    """Turn fusion on or off. If off, merged layers multiply by the whole matrix, as a slow reference."""
    for _, module in model.named_modules():
        if isinstance(module, MergedLinear | MergedQuantizedLinear):
            module.merged.together = on
        elif hasattr(module, "fuse"):
            module.fuse = on


def unfuse(model: Module) -> None:
    """Undo fusion permanently: each module computes its own operations from now on."""
    set_fused(model, False)
    for _, module in model.named_modules():
        if isinstance(module, MergedLinear | MergedQuantizedLinear):
            module.restore()


def multiplications(model: Module) -> float:
    """Return how many multiplications MLX needs for one row, counting every layer and every expert. A
    quantized weight counts 16 times, because MLX is that much slower. Return infinity for experts that MLX
    cannot multiply on a CPU."""
    count = 0.0
    for _, module in model.named_modules():
        if type(module) in _PACKED:
            size = module["weight"].size
            count += 16 * size * 32 / module.bits if "scales" in module else size
        if type(module) is SwitchLinear and module["weight"].dtype != mx.float32:
            return math.inf
    return count


def packed_bytes(model: Module) -> int:
    """Return the bytes of packed weights. An embedding is packed when it is first used as a head."""
    return sum(weight.nbytes for weight in _packed(model))


def unread_bytes(model: Module) -> int:
    """Return bytes that no step reads: group scales, if a kernel uses scales of whole channels."""
    return sum(weight.unread_nbytes for weight in _packed(model))


def _packed(model: Module) -> list[_ext.PackedWeight | _ext.PackedExperts]:
    """Return the packed weights; weights shared by modules appear once."""
    packed = {id(w): w for _, module in model.named_modules() if (w := getattr(module, "packed", None))}
    return [w for w in packed.values() if isinstance(w, _ext.PackedWeight | _ext.PackedExperts)]


def _has_own_arrays(module: Module) -> bool:
    return any(isinstance(value, mx.array) for value in module.values())


# A rule makes a module native, or returns the reason why not.


def _replace_norm(module: Any, _exact: bool) -> str | None:
    for name in ("weight", "bias"):
        if name in module and module[name].dtype not in FLOATS:
            return f"{name} in {module[name].dtype}"
    module.__class__ = NativeRMSNorm if type(module) is RMSNorm else NativeLayerNorm
    module.fuse = False
    return None


def _replace_own_norm(module: Any, kind: NormKind) -> str | None:
    """Replace a norm that a model file defines for itself."""
    module.plain, module.fuse = type(module), False
    if kind.gate_first is None:
        module.__class__ = NativeShiftedRMSNorm
        return None
    module.gate_first = kind.gate_first
    module.norm_group_size = module.group_size if kind.grouped else None
    module.__class__ = NativeGatedRMSNorm
    return None


def _rule_by_source(module: Any) -> Callable[[Any, bool], str | None] | None:
    kind = kind_of_norm(module)
    return None if kind is None else lambda norm, _exact: _replace_own_norm(norm, kind)


def _replace_rope(module: Any, _exact: bool) -> str | None:
    rotation = rope.rotation_of(module)
    if rotation.dims < 2 or rotation.dims % 2:
        return f"rotates {rotation.dims} dimensions"
    module.__class__ = rope.NATIVE[type(module)]
    module.rotation = rotation
    module.fuse = False
    return None


def _dense_reason(module: Any, num_dims: int = 2) -> str | None:
    weight: mx.array = module["weight"]
    if weight.ndim != num_dims or weight.size == 0:
        return f"weight of shape {list(weight.shape)}, not a matrix{' per expert' * (num_dims == 3)}"
    return None if weight.dtype in FLOATS else f"weight in {weight.dtype}"


@dataclass(frozen=True, slots=True)
class _Packed:
    """Rule that replaces an MLX module by a native one with packed weights, or returns the reason why not. A
    table is packed when it is first used as a head (``at_once`` False), other weights at once."""

    kind: type
    reason_of: Callable[[Any, int], str | None]
    num_dims: int = 2
    at_once: bool = True

    def __call__(self, module: Any, exact: bool) -> str | None:
        reason = self.reason_of(module, self.num_dims)
        if reason is None:
            self.put(module, exact)
            if self.at_once:
                module.pack()
        return reason

    def put(self, module: Any, exact: bool) -> None:
        """Make the module native, with its weights not packed yet."""
        module.__class__ = self.kind
        module.packed = None
        module.exact = exact


_PACKED: dict[type, _Packed] = {
    Linear: _Packed(native.NativeLinear, _dense_reason),
    QuantizedLinear: _Packed(native.NativeQuantizedLinear, native.quantized_reason),
    Embedding: _Packed(native.NativeEmbedding, _dense_reason, at_once=False),
    QuantizedEmbedding: _Packed(native.NativeQuantizedEmbedding, native.quantized_reason, at_once=False),
    SwitchLinear: _Packed(native.NativeSwitchLinear, _dense_reason, num_dims=3),
    QuantizedSwitchLinear: _Packed(native.NativeQuantizedSwitchLinear, native.quantized_reason, num_dims=3),
}
_RULES: dict[type, Callable[[Any, bool], str | None]] = {
    **_PACKED,
    RMSNorm: _replace_norm,
    LayerNorm: _replace_norm,
    **dict.fromkeys(rope.NATIVE, _replace_rope),
}
_NATIVE = (
    *(rule.kind for rule in _PACKED.values()),
    NativeRMSNorm,
    NativeLayerNorm,
    NativeShiftedRMSNorm,
    NativeGatedRMSNorm,
)
