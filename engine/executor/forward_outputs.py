from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from .adapt.cache_adapter import HookError
from .adapt.output_head import RowSelection


class Form(NamedTuple):
    takes_rows: bool
    logits: bool
    greedy: bool
    hidden: bool
    head: bool
    inputs: tuple[str, ...]


class Outputs(NamedTuple):
    """Outputs of a forward, not evaluated."""

    logits: mx.array | None = None
    choice: tuple[mx.array, mx.array] | None = None
    hidden: mx.array | None = None

    @classmethod
    def of(cls, form: Form, arrays: Sequence[mx.array]) -> Outputs:
        hidden = arrays[-1] if form.hidden else None
        if form.greedy:
            return cls(None, (arrays[0], arrays[1]), hidden)
        return cls(arrays[0] if form.logits else None, None, hidden)

    @property
    def arrays(self) -> list[mx.array]:
        return [each for each in (self.logits, *(self.choice or ()), self.hidden) if each is not None]


def results_of(form: Form, output: mx.array, found: RowSelection) -> list[mx.array]:
    results: list[mx.array] = []
    if form.greedy:
        if (choice := found.greedy_output) is None:
            raise HookError("the output head is not a native module")
        if output is not choice.of:
            raise HookError("the model changes the logits after its output head")
        results += [choice.ids.squeeze(1), choice.logits.squeeze(1)]
    elif form.logits:
        results.append((output if form.head or found.taken is None else found.taken).squeeze(1))
    if form.hidden:
        if found.kept is None:
            raise HookError("the output head was not called")
        results.append(found.kept.squeeze(1).astype(mx.float32))
    return results
