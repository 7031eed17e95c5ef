from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..chat.reasoning import Reasoning
from .constraint import AfterDrafts, Constraint, Mask

if TYPE_CHECKING:
    from ..tokenizer.detokenizer import Detokenizer
    from ..tokenizer.tokenizer import Tokenizer


class _Stage(enum.Enum):
    OPENING = enum.auto()  # reasoning and answer are both possible
    THINKING = enum.auto()
    CLOSING = enum.auto()  # the end mark is forced
    ANSWERING = enum.auto()


class ReasoningMarks:
    def __init__(self, reasoning: Reasoning, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        self.reasoning = reasoning
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.end_ids = np.array(sorted(id for id in tokenizer.eos_ids if id < vocab_size), np.intp)
        self.closing = self._ids(reasoning.end)
        self.openings = tuple(
            ids
            for text in filter(None, (reasoning.start, reasoning.direct))
            if tokenizer.is_added((ids := self._ids(text))[0])
        )

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def gate(
        self, prompt_ids: Sequence[int], constraint: Constraint | None, budget: int | None
    ) -> ReasoningGate | None:
        """Return a gate for output after this prompt; None if the output has no reasoning."""
        tail = self.tokenizer.prompt_tail(prompt_ids)
        if self.reasoning.is_open(tail):
            return ReasoningGate(self, constraint, budget, is_open=True)
        if self.reasoning.is_closed(tail) or not self.openings:
            return None
        return ReasoningGate(self, constraint, budget, is_open=False)


class ReasoningGate:
    """Allows all tokens during reasoning, then applies the constraint.

    ``budget`` is the number of reasoning tokens after which the end mark is forced.
    """

    __slots__ = ("_budget", "_constraint", "_detokenizer", "_marks", "_path", "_stage", "_text")

    def __init__(
        self, marks: ReasoningMarks, constraint: Constraint | None, budget: int | None, *, is_open: bool
    ) -> None:
        self._marks = marks
        self._constraint = constraint
        self._budget = budget
        self._stage = _Stage.THINKING if is_open else _Stage.OPENING
        self._path: tuple[int, ...] = ()
        self._text = ""
        self._detokenizer: Detokenizer | None = None
        self._check_budget()

    def copies(self, num_samples: int) -> list[ReasoningGate]:
        constraints: Sequence[Constraint | None] = [None] * num_samples
        if self._constraint is not None:
            constraints = self._constraint.copies(num_samples)
        is_open = self._stage is not _Stage.OPENING
        return [ReasoningGate(self._marks, each, self._budget, is_open=is_open) for each in constraints]

    @property
    def is_late(self) -> bool:
        return self._constraint is not None and self._constraint.is_late

    @property
    def is_complete(self) -> bool:
        answers = self._stage is _Stage.ANSWERING and self._constraint is not None
        return answers and self._constraint is not None and self._constraint.is_complete

    def completed(self, drafts: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        if self._stage is _Stage.ANSWERING and self._constraint is not None:
            return self._constraint.completed(drafts, max_tokens)
        if self._stage is _Stage.ANSWERING:
            return tuple(drafts[:max_tokens])
        if self._stage is not _Stage.THINKING:
            return ()
        room = max_tokens if self._budget is None else min(max_tokens, self._budget - 1)
        last = self._marks.reasoning.end[-1]
        found: list[int] = []
        for draft in drafts[: max(room, 0)]:
            text = self._marks.tokenizer.decode([draft], skip_special_tokens=False)
            if last in text or draft in self._marks.end_ids:
                break
            found.append(draft)
        return tuple(found)

    def prepare(self, drafts: Sequence[int] = ()) -> None:
        if self._constraint is not None and self._stage in (_Stage.ANSWERING, _Stage.OPENING):
            self._constraint.prepare(drafts)

    def drop(self) -> None:
        if self._constraint is not None:
            self._constraint.drop()

    def after(self, drafts: Sequence[int]) -> AfterDrafts | ReasoningGate:
        if self._stage is _Stage.ANSWERING and self._constraint is not None:
            return self._constraint.after(drafts)
        return self

    def allowed(self, *, may_end: bool = True, may_be_late: bool = False) -> Mask:
        constraint, marks = self._constraint, self._marks
        match self._stage:
            case _Stage.ANSWERING if constraint is not None:
                return constraint.allowed(may_end=may_end, may_be_late=may_be_late)
            case _Stage.ANSWERING:
                return self._any(may_end=may_end)
            case _Stage.THINKING:
                return self._any(may_end=may_end and constraint is None)
            case _Stage.CLOSING:
                return self._only([marks.closing[len(self._path)]])
        nexts = self._opening_ids()
        if self._path:
            return self._only(nexts)
        if constraint is None:
            mask = self._any(may_end=may_end)
        else:
            mask = constraint.allowed(may_end=may_end, may_be_late=may_be_late)
        if self._budget != 0:
            mask[nexts] = True
        return mask

    def accept(self, token: int) -> None:
        match self._stage:
            case _Stage.ANSWERING:
                if self._constraint is not None:
                    self._constraint.accept(token)
            case _Stage.THINKING:
                self._accept_thought(token)
            case _Stage.CLOSING:
                self._path = (*self._path, token)
                if len(self._path) == len(self._marks.closing):
                    self._stage = _Stage.ANSWERING
            case _Stage.OPENING:
                self._accept_opening(token)

    def _accept_opening(self, token: int) -> None:
        marks, path = self._marks, (*self._path, token)
        if token not in self._opening_ids():
            self._answer([token])
            return
        self._path = path
        if path in marks.openings:
            is_reasoning = path == marks.openings[0]
            self._stage, self._path = (_Stage.THINKING if is_reasoning else _Stage.ANSWERING), ()
            self._check_budget()

    def _opening_ids(self) -> list[int]:
        length = len(self._path)
        return [
            ids[length] for ids in self._marks.openings if ids[:length] == self._path and length < len(ids)
        ]

    def _accept_thought(self, token: int) -> None:
        marks = self._marks
        if self._detokenizer is None:
            self._detokenizer = marks.tokenizer.detokenizer(shows_special=True)
        end = marks.reasoning.end
        self._text += self._detokenizer.add(token)
        if end in self._text:
            rest = self._text.partition(end)[2].strip()
            self._answer(marks.tokenizer.encode(rest, add_special_tokens=False) if rest else ())
            return
        self._text = self._text[-len(end) :]
        if self._budget is not None:
            self._budget -= 1
            self._check_budget()

    def _check_budget(self) -> None:
        if self._stage is _Stage.THINKING and self._budget is not None and self._budget <= 0:
            self._stage = _Stage.CLOSING

    def _answer(self, tokens: Sequence[int]) -> None:
        self._stage, self._text, self._detokenizer = _Stage.ANSWERING, "", None
        if self._constraint is not None:
            for token in tokens:
                self._constraint.accept(token)

    def _any(self, *, may_end: bool) -> Mask:
        mask = np.ones(self._marks.vocab_size, np.bool_)
        if not may_end:
            mask[self._marks.end_ids] = False
        return mask

    def _only(self, tokens: Sequence[int]) -> Mask:
        mask = np.zeros(self._marks.vocab_size, np.bool_)
        mask[list(tokens)] = True
        return mask


AnyConstraint: TypeAlias = Constraint | ReasoningGate
