"""Events of a parser: the parts of an answer, in the order in which they are generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the content, which is the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Begin of a call of the tool ``name``. ``index``: index of the call in the answer."""

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
    """End of a call: its arguments are complete."""

    index: int


@dataclass(frozen=True, slots=True)
class CallMalformed:
    """Text that looked like a call but is malformed. ``index``: index of the call, if it has begun."""

    text: str
    index: int | None


Event: TypeAlias = ReasoningText | ContentText | CallBegin | CallArguments | CallEnd | CallMalformed
