"""One rank's part of an mlx-lm model: its own heads and columns, and sums over the ranks.

mlx-lm's ``shard`` chooses the parts. Its communicating layers are then replaced by plain linear layers inside
a module that sums. So native kernels, quantization and merged projections, which need plain layers, work here
too.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
from mlx.nn.layers import distributed
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from ...api.errors import InvalidConfig

_SPLIT_OUTPUTS = (distributed.AllToShardedLinear, distributed.QuantizedAllToShardedLinear)
_SPLIT_INPUTS = (distributed.ShardedToAllLinear, distributed.QuantizedShardedToAllLinear)


class RankSum(Module):
    """A linear layer over part of the inputs; the sum over the ranks is the whole layer's output. Parts are
    added in the order of the ranks. The ring's own sum of three or more ranks starts each piece of an array
    at another rank, so a row's bits would depend on its place in the batch."""

    def __init__(self, inner: Module, bias: mx.array | None, group: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner
        self._group = group
        if bias is not None:
            self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        y = self.inner(x)
        if self._group.size() == 2:
            y = mx.distributed.all_sum(y, group=self._group)
        else:
            parts = mx.distributed.all_gather(y[None], group=self._group)
            y = parts[0]
            for part in parts[1:]:
                y = y + part
        return y + self["bias"] if "bias" in self else y


def shard(model: Any, group: Any) -> None:
    """Reduce the model to this rank's part; InvalidConfig if it cannot be split."""
    kind = type(model).__module__.rpartition(".")[2]
    if not hasattr(model, "shard"):
        raise InvalidConfig(
            f"tensor_parallel must be 1 for {kind} models, which mlx-lm cannot split, got {group.size()}"
        )
    _drop_gradients()
    try:
        model.shard(group)
    except (ValueError, AssertionError) as error:
        raise InvalidConfig(
            f"tensor_parallel must divide the heads and widths of {kind} models, got {group.size()}: {error}"
        ) from error
    modules = list(model.named_modules())
    if group.size() > 2 and any(getattr(module, "sharding_group", None) for _, module in modules):
        raise InvalidConfig(
            f"tensor_parallel must be at most 2 for {kind} models, because a row's bits would depend on its "
            f"batch, got {group.size()}"
        )
    for path, module in modules:
        if (plain := _as_plain(module, group)) is not None:
            parent, _, name = path.rpartition(".")
            setattr(_at(model, parent), name, plain)


def _drop_gradients() -> None:
    """Remove graph nodes from mlx-lm's models that only training needs."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and hasattr(module, "sum_gradients"):
            module.sum_gradients = _without_gradients  # type: ignore[attr-defined]


def _without_gradients(_group: Any) -> Any:
    return lambda x: x


def _as_plain(module: Any, group: Any) -> Module | None:
    """Return a communicating layer as plain layers; None for other modules."""
    kind = type(module)
    if kind not in _SPLIT_OUTPUTS + _SPLIT_INPUTS:
        return None
    layer: Any
    if "scales" in module:
        layer = QuantizedLinear(32, 1, bias=False, group_size=32)
        layer.group_size, layer.bits, layer.mode = module.group_size, module.bits, module.mode
        layer.scales = module.scales
        del layer["biases"]
        if module.get("biases") is not None:
            layer.biases = module.biases
    else:
        layer = Linear(1, 1, bias=False)
    layer.weight = module.weight
    bias = module.get("bias")
    plain: Module = layer
    if kind in _SPLIT_INPUTS:
        return RankSum(layer, bias, group)
    if bias is not None:
        layer.bias = bias
    return plain


def _at(model: Any, path: str) -> Any:
    node = model
    for part in path.split(".") if path else ():
        node = node[int(part)] if isinstance(node, list) else getattr(node, part)
    return node
