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

from ..model_ops import Report, UnchangedModule
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

    Weights are packed layer by layer. Call it on the thread that evaluates the model.

    With ``exact``, refuse kernels that round activations.
    Raises ModelLoadError if a native module's results differ from mlx-lm's.
    """
    work = _Replacement(model, exact, Comparison(observed.calls))
    work.pack_heads(observed.heads)
    _ext.release_kept()
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
    def __init__(self, model: Module, exact: bool, comparison: Comparison) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._exact = exact
        self.comparison = comparison
        self.replaced: Counter[str] = Counter()
        self.kept: list[UnchangedModule] = []
        self.merged: Counter[str] = Counter()
        self.apart: list[UnchangedModule] = []

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
        for group in groups:
            label = " + ".join(self._names[id(module)].rpartition(".")[2] for module in group)
            kind = type(group[0])
            rule = _PACKED[kind]
            reasons = (rule.reason_of(module, rule.num_dims) for module in group)
            reason = next((reason for reason in reasons if reason is not None), None)
            if reason is not None:
                self.apart.append(UnchangedModule(label, kind.__name__, reason))
                continue
            before = self.comparison.expect(*((self._names[id(module)], module) for module in group))
            for module in group:
                rule.put(module, self._exact)
            Merged(group)
            self.merged[label] += 1
            for expected, module in zip(before, group, strict=True):
                self._meet(expected, module, kind)

    def replace(self, modules: Sequence[tuple[str, Any]], *, fuse: bool) -> None:
        for name, module in modules:
            kind = type(module)
            rule = _RULES.get(kind) or _rule_by_source(module)
            if rule is None:
                if _has_own_arrays(module) and not isinstance(module, _NATIVE):
                    self.kept.append(UnchangedModule(name, kind.__name__, "no native kernel for this type"))
                continue
            reason = rule.reason_of(module, rule.num_dims) if isinstance(rule, _Packed) else None
            before = [] if reason else self.comparison.expect((name, module))
            reason = reason or rule(module, self._exact)
            if reason is not None:
                self.kept.append(UnchangedModule(name, kind.__name__, reason))
                continue
            self._meet(before[0], module, kind)
            if hasattr(module, "fuse"):
                module.fuse = fuse

    def _meet(self, expected: Expected, module: Module, kind: type) -> None:
        self.replaced[kind.__name__] += 1
        self.comparison.meet(expected, module)


def replaceable(model: Module) -> set[type]:
    return {
        type(module) for _, module in model.named_modules() if type(module) in _RULES or kind_of_norm(module)
    }


def set_fused(model: Module, on: bool) -> None:
    for _, module in model.named_modules():
        if isinstance(module, MergedLinear | MergedQuantizedLinear):
            module.merged.together = on
        elif hasattr(module, "fuse"):
            module.fuse = on


def unfuse(model: Module) -> None:
    set_fused(model, False)
    for _, module in model.named_modules():
        if isinstance(module, MergedLinear | MergedQuantizedLinear):
            module.restore()


def multiplications(model: Module) -> float:
    count = 0.0
    for _, module in model.named_modules():
        if type(module) in _PACKED:
            size = module["weight"].size
            count += 16 * size * 32 / module.bits if "scales" in module else size
        if type(module) is SwitchLinear and module["weight"].dtype != mx.float32:
            return math.inf
    return count


def packed_bytes(model: Module) -> int:
    return sum(weight.nbytes for weight in _packed(model))


def unread_bytes(model: Module) -> int:
    return sum(weight.unread_nbytes for weight in _packed(model))


def _packed(model: Module) -> list[_ext.PackedWeight | _ext.PackedExperts]:
    packed = {id(w): w for _, module in model.named_modules() if (w := getattr(module, "packed", None))}
    return [w for w in packed.values() if isinstance(w, _ext.PackedWeight | _ext.PackedExperts)]


def _has_own_arrays(module: Module) -> bool:
    return any(isinstance(value, mx.array) for value in module.values())


def _replace_norm(module: Any, _exact: bool) -> str | None:
    for name in ("weight", "bias"):
        if name in module and module[name].dtype not in FLOATS:
            return f"{name} in {module[name].dtype}"
    module.__class__ = NativeRMSNorm if type(module) is RMSNorm else NativeLayerNorm
    module.fuse = False
    return None


def _replace_own_norm(module: Any, kind: NormKind) -> str | None:
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
    return None


def _dense_reason(module: Any, num_dims: int = 2) -> str | None:
    weight: mx.array = module["weight"]
    if weight.ndim != num_dims or weight.size == 0:
        return f"weight of shape {list(weight.shape)}, not a matrix{' per expert' * (num_dims == 3)}"
    return None if weight.dtype in FLOATS else f"weight in {weight.dtype}"


@dataclass(frozen=True, slots=True)
class _Packed:
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
