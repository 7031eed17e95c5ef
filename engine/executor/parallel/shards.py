"""A rank's part of each layer, in tensor parallel.

mlx-lm's ``shard`` splits the model. Layers that communicate become plain linear layers, and ``RankSum``
adds their outputs. So native kernels and quantization work on each rank. All sums are added in the order of
the ranks, because the bits of MLX's own sum of more than two depend on a row's position in the batch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.nn.layers import distributed
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from ...api.errors import InvalidConfig
from ..adapt.output_head import module_at, output_heads, put_module
from ..adapters.files import Factors
from ..adapters.layers import RankLayers
from ..batch import Batch
from ..cache_layout import CacheLayout
from ..load.discover import discover_layout
from ..load.load import Made, WholeModel
from ..model_runner import PagedRunner
from ..overrides import model_modules, override, replaced
from ..row_inputs import RowInputs
from .group import RankGroup

_SPLIT_OUTPUTS = (distributed.AllToShardedLinear, distributed.QuantizedAllToShardedLinear)
_SPLIT_INPUTS = (distributed.ShardedToAllLinear, distributed.QuantizedShardedToAllLinear)


class RankSum(Module):
    """Linear layer over part of the inputs; its results are summed over the ranks."""

    def __init__(self, inner: Module, bias: mx.array | None, group: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner
        self._group = group
        if bias is not None:
            self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        y = mx.distributed.all_sum(self.inner(x), group=self._group)
        return y + self["bias"] if "bias" in self else y


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's part of a layer's inputs or outputs; a call cuts the same part from factors."""

    of_inputs: bool
    segments: Any
    group: Any

    def __call__(self, factors: Factors) -> Factors:
        if not self.of_inputs:
            magnitude = factors.magnitude
            return replace(
                factors,
                b=self._part(factors.b),
                magnitude=None if magnitude is None else self._part(magnitude),
            )
        return replace(factors, a=self._part(factors.a))

    def _part(self, x: mx.array) -> mx.array:
        try:
            part: mx.array = distributed._shard({"": x}, lambda *_: (-1, self.segments), self.group)[""]
        except ValueError:
            return x
        return part


def shard(model: Any, group: Any) -> dict[str, Share]:
    """Reduce the model to this rank's part; return the shares of split layers.

    Raises InvalidConfig if the model cannot be split.
    """
    kind = type(model).__module__.rpartition(".")[2]
    text: Any = model if hasattr(model, "shard") else getattr(model, "language_model", None)
    if not hasattr(text, "shard"):
        raise InvalidConfig(
            f"tensor_parallel must be 1 for {kind} models, which mlx-lm cannot split, got {group.size()}"
        )
    _drop_gradients()
    try:
        with _recorded() as recorded:
            text.shard(group)
    except (ValueError, AssertionError) as error:
        raise InvalidConfig(
            f"tensor_parallel must divide the heads and widths of {kind} models, got {group.size()}: {error}"
        ) from error
    if group.size() > 2:
        override("mlx.core.distributed", "all_sum", _in_order)
    modules = list(model.named_modules())
    for path, module in modules:
        if (plain := _as_plain(module, group)) is not None:
            put_module(model, path, plain)
    shares = {id(weight): share for weight, share in recorded}
    return {path: shares[key] for path, module in modules if (key := id(module.get("weight"))) in shares}


def _in_order(_plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def all_sum(x: mx.array, *, group: Any = None, stream: Any = None) -> mx.array:
        parts = mx.distributed.all_gather(x[None], group=group, stream=stream)
        return functools.reduce(operator.add, parts)

    return all_sum


@contextmanager
def _recorded() -> Iterator[list[tuple[mx.array, Share]]]:
    recorded: list[tuple[mx.array, Share]] = []

    def recording(split: Any) -> Any:
        def shard(parameters: Any, sharding_predicate: Any, group: Any = None) -> Any:
            parts, whole = split(parameters, sharding_predicate, group), parameters.get("weight")
            if isinstance(whole, mx.array) and (how := sharding_predicate("weight", whole)) is not None:
                axis, segments = how if isinstance(how, tuple) else (how, 1)
                share = Share(axis % whole.ndim == whole.ndim - 1, segments, group)
                recorded.append((parts["weight"], share))
            return parts

        return shard

    with replaced((distributed, "_shard", recording)):
        yield recorded


def _drop_gradients() -> None:
    for module in model_modules():
        if hasattr(module, "sum_gradients"):
            module.sum_gradients = _without_gradients  # type: ignore[attr-defined]


def _without_gradients(_group: Any) -> Any:
    return lambda x: x


def _as_plain(module: Any, group: Any) -> Module | None:
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


class Shard(WholeModel):
    is_whole = False
    whole: CacheLayout

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.rank = group.rank
        self.row_inputs: RowInputs = RowInputs()

    def available(self, usable: Callable[[int], int], weight_bytes: int) -> int:
        return usable(weight_bytes * self._group.num_here // self._group.size) // self._group.num_here

    def smallest(self, value: int) -> int:
        return self._group.smallest(value)

    def by_all(self, make: Callable[[], Made]) -> Made:
        made, failure = None, InvalidConfig("kv_format must suit all ranks; choose another kv_format")
        try:
            made = make()
        except InvalidConfig as error:
            failure = error
        if not self._group.smallest(int(made is not None)) or made is None:
            raise failure
        return made

    def split(self, model: Any) -> None:
        self.whole = discover_layout(model, type(model).__module__.rpartition(".")[2])
        heads = output_heads(model, self.whole.vocab_size)
        self.layers = RankLayers(shard(model, self._group.mlx))
        for path, head in heads:
            parent, _, name = path.rpartition(".")
            owner = module_at(model, parent)
            if getattr(owner, name) is not head:
                setattr(owner, name, head)
                owner.sharding_group = None

    def receive(self, batch: Batch) -> Batch:
        return batch

    def follow(self, runner: PagedRunner, batch: Batch) -> tuple[int, ...]:
        return runner.run(batch, None).failed_rows
