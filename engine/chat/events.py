"""Parts of an answer, in the order in which they are generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of the tool ``name``; ``index`` counts the calls of the answer."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as JSON text; all pieces together are one object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments are complete."""

    index: int


@dataclass(frozen=True, slots=True)
class CallMalformed:
    """Text that began as a call but is malformed. ``index``: of the open call, if any."""

    text: str
    index: int | None


Event: TypeAlias = ReasoningText | ContentText | CallBegin | CallArguments | CallEnd | CallMalformed
