"""Several streams of text on one screen: live lines on a terminal, labelled lines in a pipe."""

from __future__ import annotations

import shutil
import sys
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self, TextIO

CHUNK = 24  # characters of a stream per line of output in a pipe


class View(ABC):
    @abstractmethod
    def update(self, label: str, text: str) -> None: ...

    @abstractmethod
    def end(self, label: str, ok: bool) -> None:
        """End a stream; ``ok`` tells whether its text is right."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def restore(self) -> None:  # noqa: B027  (most views have nothing to restore)
        ...


class LineView(View):
    """View for pipes and logs: prints a line per piece of text, with the time and the label."""

    def __init__(self, streams: list[tuple[str, str]], out: TextIO) -> None:
        self.out = out
        self.begin = time.perf_counter()
        self.pending = {label: "" for label, _ in streams}
        self.width = max(len(label) for label, _ in streams)
        for label, question in streams:
            print(f"  {'':7} {label:{self.width}} ? {question}", file=out)

    def update(self, label: str, text: str) -> None:
        if len(self.pending[label]) >= CHUNK and text.startswith(" "):
            self._flush(label, "|")
        self.pending[label] += text

    def end(self, label: str, ok: bool) -> None:
        if self.pending[label]:
            self._flush(label, "|")
        self.pending[label] = "(right)" if ok else "(WRONG)"
        self._flush(label, "=")

    def _flush(self, label: str, mark: str) -> None:
        seconds = time.perf_counter() - self.begin
        print(f"  {seconds:6.3f}s {label:{self.width}} {mark} {self.pending[label].strip()}", file=self.out)
        self.pending[label] = ""
        self.out.flush()


class LiveView(View):
    """View for terminals: redraws one line per stream in place, with the end of the text."""

    def __init__(self, streams: list[tuple[str, str]], out: TextIO) -> None:
        self.out = out
        self.questions = dict(streams)
        self.text = dict.fromkeys(self.questions, "")
        self.marks = dict.fromkeys(self.questions, " ")
        self.width = max(len(label) for label in self.questions)
        self.drawn = False

    def __enter__(self) -> Self:
        self.out.write("\x1b[?25l")
        self._draw()
        return self

    def restore(self) -> None:
        self.out.write("\x1b[?25h")
        self.out.flush()

    def update(self, label: str, text: str) -> None:
        self.text[label] += text
        self._draw()

    def end(self, label: str, ok: bool) -> None:
        self.marks[label] = "\x1b[32m✓\x1b[0m" if ok else "\x1b[31m✗\x1b[0m"
        self._draw()

    def _draw(self) -> None:
        columns = shutil.get_terminal_size().columns
        if self.drawn:
            self.out.write(f"\x1b[{len(self.text)}A")
        for label, text in self.text.items():
            question = self.questions[label]
            room = columns - self.width - len(question) - 8
            shown = text.replace("\n", " ")
            if len(shown) > room:
                shown = "…" + shown[-max(1, room - 1) :]
            head = f"{self.marks[label]} \x1b[1m{label:{self.width}}\x1b[0m \x1b[2m{question}\x1b[0m"
            self.out.write(f"\r\x1b[2K{head} {shown}\n")
        self.drawn = True
        self.out.flush()


def make_view(streams: list[tuple[str, str]], out: TextIO = sys.stdout) -> View:
    if out.isatty() and shutil.get_terminal_size().columns >= 80:
        return LiveView(streams, out)
    return LineView(streams, out)
