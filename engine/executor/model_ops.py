"""Operations of a model besides attention, by MLX's modules or by native modules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from octavo.kernels.channel_weights import Quantized, quantize_as

from .adapt.output_head import TakeRows
from .sampling.logit_rows import Sampler


@dataclass(frozen=True, slots=True)
class Fusion:
    set_fused: Callable[[Module, bool], None]
    unfuse: Callable[[Module], None]


@dataclass(frozen=True, slots=True)
class UnchangedModule:
    name: str
    type: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """Replacements of a model's modules.

    ``num_bytes`` counts packed weights, which are not in ``model.parameters()``.
    """

    replaced: dict[str, int]
    kept: tuple[UnchangedModule, ...]
    functions: tuple[str, ...]
    merged: dict[str, int]
    apart: tuple[UnchangedModule, ...]
    num_bytes: int


class ImageResults(NamedTuple):
    """Results of attention, some queries in each, and arrays to evaluate before these results."""

    before: list[mx.array]
    parts: list[mx.array]


class ImageAttention(Protocol):
    """Attention of each row to all rows, for arrays [1, H, rows, D] and a mask [..., queries, keys] or None.

    Computes ``size`` queries at a time. Returns None for arrays that it cannot take.
    """

    def __call__(
        self, q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | None, size: int, /
    ) -> ImageResults | None: ...

    def forget(self) -> None: ...


class ModelOps:
    """MLX's own operations; subclasses replace them."""

    fusion: Fusion | None = None

    @property
    def take_rows(self) -> TakeRows:
        """Function that returns rows of activations: ``take_rows(x, rows)`` is x[rows]."""
        return operator.getitem

    def loading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def quantizing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def quantize_channels(self, kind: str, arrays: Sequence[mx.array], group_size: int) -> Quantized:
        return quantize_as(kind, arrays, group_size)

    def prepare_model(
        self,
        model: Module,
        *,
        exact: bool,  # noqa: ARG002
        fuse: bool,  # noqa: ARG002
        reference: Callable[[], None],
    ) -> Report | None:
        """Make the loaded model compute with these operations, in place.

        With ``exact``, refuse operations that round activations.
        """
        for parameter in dict(tree_flatten(model.parameters())).values():
            mx.eval(parameter)
        reference()
        return None

    def prepare_tower(self, tower: Module, *, exact: bool) -> ImageAttention | None:  # noqa: ARG002
        """Make a vision part compute with these operations; return their attention, if they have one."""
        return None

    def weight_bytes(self, model: Module) -> int:
        """Return the bytes of the weights. Call it after the first forward."""
        return parameter_bytes(model)

    def unread_weight_bytes(self, model: Module) -> int:  # noqa: ARG002
        return 0

    def sampler(self) -> Sampler:
        return Sampler()


def parameter_bytes(model: Module) -> int:
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return sum(array.nbytes for array in arrays.values())
