from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from .events import Event

_T = TypeVar("_T")
Steps: TypeAlias = Generator[Event | None, None, _T]
Wrap: TypeAlias = Callable[[str], Event]


class Malformed(Exception):
    """The text turned out not to be a tool call."""


class Unfinished(Exception):
    """The text ended within a tool call."""


class TextSource:
    """Buffer between incoming text and a parser."""

    def __init__(self) -> None:
        self.rest = ""
        self.is_closed = False
        self._taken: list[str] = []

    def mark(self, opened: str = "") -> None:
        self._taken = [opened]

    @property
    def taken(self) -> str:
        """All text consumed since ``mark``."""
        self._taken = ["".join(self._taken)]
        return self._taken[0]

    def take(self, length: int) -> str:
        """Consume and return the next characters."""
        piece, self.rest = self.rest[:length], self.rest[length:]
        self._taken.append(piece)
        return piece

    def give_back(self, text: str) -> None:
        """Put consumed text back at the front of the buffer."""
        assert self.taken.endswith(text)
        self._taken = [self.taken.removesuffix(text)]
        self.rest = text + self.rest

    def more(self) -> Steps[bool]:
        """Wait for more text; return False at the end of the text."""
        length = len(self.rest)
        while len(self.rest) == length:
            if self.is_closed:
                return False
            yield None
        return True

    def require_more(self) -> Steps[None]:
        """Wait for more text. Raises Unfinished at the end of the text."""
        if not (yield from self.more()):
            raise Unfinished

    def skip_space(self) -> Steps[None]:
        while True:
            self.take(len(self.rest) - len(self.rest.lstrip()))
            if self.rest or not (yield from self.more()):
                return

    def starts_with(self, *texts: str) -> Steps[str | None]:
        """Return the longest of ``texts`` at the front of the buffer, without consuming it."""
        while any(text.startswith(self.rest) and text != self.rest for text in texts):
            if not (yield from self.more()):
                break
        return max((text for text in texts if self.rest.startswith(text)), key=len, default=None)

    def comes(self, text: str) -> Steps[bool]:
        """Consume ``text`` if it comes next. Raises Unfinished if the input ends inside it."""
        if (yield from self.starts_with(text)) is not None:
            self.take(len(text))
            return True
        if self._is_cut_within((text,)):
            raise Unfinished
        return False

    def expect(self, *texts: str) -> Steps[str]:
        """Skip white space, then consume one of ``texts``. Raises Malformed or Unfinished."""
        yield from self.skip_space()
        found = yield from self.starts_with(*texts)
        if found is None:
            raise Unfinished if self._is_cut_within(texts) else Malformed
        return self.take(len(found))

    def _is_cut_within(self, texts: tuple[str, ...]) -> bool:
        return self.is_closed and any(text.startswith(self.rest) for text in texts)

    def stream_until(self, *marks: str, wrap: Wrap, holds_space: bool = False) -> Steps[str | None]:
        """Yield the text before the first mark in pieces. Return the mark, or None without a mark."""
        while True:
            found = self._first_of(marks)
            if found is not None:
                at, mark = found
                piece = self.take(at)
                if piece := piece.rstrip() if holds_space else piece:
                    yield wrap(piece)
                self.take(len(mark))
                return mark
            certain = self.certain_length(marks)
            if holds_space:
                certain = len(self.rest[:certain].rstrip())
            if certain:
                yield wrap(self.take(certain))
            if not (yield from self.more()):
                return None

    def read_until(self, *marks: str) -> Steps[tuple[str, str]]:
        """Consume and return the text before the first mark, and the mark. Raises Unfinished."""
        while (found := self._first_of(marks)) is None:
            yield from self.require_more()
        at, mark = found
        text = self.take(at)
        self.take(len(mark))
        return text, mark

    def certain_length(self, marks: tuple[str, ...]) -> int:
        longest = max(map(len, marks), default=0)
        for start in range(max(0, len(self.rest) - longest + 1), len(self.rest)):
            if any(mark.startswith(self.rest[start:]) for mark in marks):
                return start
        return len(self.rest)

    def _first_of(self, marks: tuple[str, ...]) -> tuple[int, str] | None:
        found = [(self.rest.find(mark), -len(mark), mark) for mark in marks if mark in self.rest]
        if not found:
            return None
        at, _, mark = min(found)
        return at, mark

    def json_value(self, wrap: Wrap | None = None) -> Steps[str]:
        """Consume a JSON value and return its text. The value's syntax is not checked. Raises Malformed or
        Unfinished."""
        yield from self.skip_space()
        if not self.rest:
            raise Unfinished
        scan, whole = _ValueEnd(), ""
        while True:
            end = scan.end_in(self.rest)
            piece = self.take(len(self.rest) if end is None else end)
            whole += piece
            if piece and wrap is not None:
                yield wrap(piece)
            if end is not None:
                if not whole.strip():
                    raise Malformed
                return whole
            yield from self.require_more()


class _ValueEnd:
    def __init__(self) -> None:
        self._closers: list[str] = []
        self._in_string = False
        self._is_escaped = False
        self._is_scalar = False

    def end_in(self, text: str) -> int | None:
        for position, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
                    if not self._closers:
                        return position + 1
            elif self._is_scalar and (character in ",]}" or character.isspace()):
                return position
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._closers.append("}" if character == "{" else "]")
            elif character in "}]":
                if not self._closers or self._closers.pop() != character:
                    raise Malformed
                if not self._closers:
                    return position + 1
            elif not self._closers:
                self._is_scalar = True
        return None
