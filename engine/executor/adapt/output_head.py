from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

TakeRows = Callable[[mx.array, mx.array], mx.array]
HEAD_NAMES = frozenset({"lm_head", "embed_out", "output", "head", "output_layer"})


@dataclass(frozen=True, slots=True)
class GreedyHeadOutput:
    of: mx.array
    ids: mx.array
    logits: mx.array


class RowSelection:
    def __init__(self, take: TakeRows = operator.getitem) -> None:
        self._take = take
        self.is_choosing = False
        self.rows: mx.array | None = None
        self.greedy = False
        self.greedy_output: GreedyHeadOutput | None = None
        self.taken: mx.array | None = None
        self.kept_rows: mx.array | None = None
        self.kept: mx.array | None = None

    @contextlib.contextmanager
    def choosing(
        self, rows: mx.array | None, kept_rows: mx.array | None = None, *, greedy: bool = False
    ) -> Iterator[RowSelection]:
        self.is_choosing, self.rows, self.kept_rows, self.greedy = True, rows, kept_rows, greedy
        try:
            yield self
        finally:
            self.rows = self.kept_rows = self.kept = self.taken = self.greedy_output = None
            self.is_choosing = self.greedy = False

    def __call__(self, x: mx.array, head: Module, compute: Callable[[mx.array], mx.array]) -> mx.array:
        if self.kept_rows is not None:
            self.kept = self._take(x, self.kept_rows)
        x = x if self.rows is None else self._take(x, self.rows)
        if self.is_choosing:  # an array that is kept for longer keeps the weights before they are packed
            self.taken = x
        logits = compute(x)
        if self.greedy and hasattr(head, "argmax"):
            chosen = head.argmax(x)
            self.greedy_output = GreedyHeadOutput(logits, chosen.ids, chosen.logits)
        return logits


class SelectingHead(Module):
    """Output head that computes logits only for selected rows."""

    def __init__(self, head: Module, selection: RowSelection) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = head
        self._select = selection

    def __call__(self, x: mx.array) -> mx.array:
        return self._select(x, self.inner, self.inner)

    def __getattr__(self, name: str) -> Any:
        inner = self.get("inner")
        return super().__getattr__(name) if inner is None or name == "inner" else getattr(inner, name)


def select_rows(model: Module, *, vocab_size: int, take: TakeRows = operator.getitem) -> RowSelection:
    """Let the output head compute only the selected rows. Call this before native layers replace MLX's."""
    selection = RowSelection(take)
    for _, module in list(model.named_modules()):
        if hasattr(module, "as_linear"):
            object.__setattr__(module, "as_linear", _selecting(module, selection))
    for path, module in output_heads(model, vocab_size):
        put_module(model, path, SelectingHead(module, selection))
    return selection


def output_heads(model: Module, vocab_size: int) -> list[tuple[str, Any]]:
    modules: list[tuple[str, Any]] = model.named_modules()
    return [
        (path, module)
        for path, module in modules
        if path.rpartition(".")[2] in HEAD_NAMES
        and not hasattr(module, "as_linear")
        and "weight" in module
        and module.weight.shape[0] == vocab_size
    ]


def _selecting(embedding: Any, selection: RowSelection) -> Callable[[mx.array], mx.array]:
    def as_linear(x: mx.array) -> mx.array:
        return selection(x, embedding, functools.partial(type(embedding).as_linear, embedding))

    return as_linear


def module_at(model: Module, path: str) -> Any:
    node: Any = model
    for part in path.split(".") if path else ():
        node = node[int(part)] if isinstance(node, list) else getattr(node, part)
    return node


def put_module(model: Module, path: str, value: Any) -> None:
    parent, _, name = path.rpartition(".")
    node = module_at(model, parent)
    if isinstance(node, list):
        node[int(name)] = value
    else:
        setattr(node, name, value)
