from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """``index`` is the call's position in the output."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """JSON text, which may be a part of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int


@dataclass(frozen=True, slots=True)
class CallMalformed:
    """Text of a malformed tool call. ``index`` is None if the call has not begun."""

    text: str
    index: int | None


Event: TypeAlias = ReasoningText | ContentText | CallBegin | CallArguments | CallEnd | CallMalformed
