from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ..api.errors import InvalidConfig
from .sources import EPILOG, found_options

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """An argparse parser with one-line errors and without abbreviations. Options are added on first use."""

    def __init__(
        self, *, fill: Callable[[argparse.ArgumentParser], None] | None = None, **settings: Any
    ) -> None:
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", _HelpFormatter)
        super().__init__(**settings)
        self._fill = fill
        self._reads_sources = False
        self.origins: dict[str, str] = {}

    def complete(self) -> None:
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)

    def read_sources(self) -> None:
        self._reads_sources = True
        self.epilog = EPILOG

    def command(self, name: str) -> Parser:
        """Return the complete parser of a subcommand. Raises KeyError for an unknown name."""
        self.complete()
        (commands,) = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        found = commands.choices[name]
        assert isinstance(found, Parser)
        found.complete()
        return found

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        self.complete()
        if self._reads_sources and args and not {"-h", "--help"} & set(args[0]):
            args = (self._with_sources(args[0]), *args[1:])
        namespace, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def _with_sources(self, argv: list[str]) -> list[str]:
        try:
            found = found_options(self, argv, os.environ)
        except InvalidConfig as error:
            self.error(str(error))
        self.origins = found.origins
        return [*found.words, *argv]

    def error(self, message: str) -> NoReturn:
        for option, origin in self.origins.items():
            if message.startswith("argument ") and option in message.partition(":")[0].split(" ")[1].split(
                "/"
            ):
                message = f"{message} (from {origin})"
        say_error(self.prog.removeprefix("octavo").strip(), f"{message}; see `{self.prog} --help`")
        sys.exit(2)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is True or action.default in (None, False, "", []):
            return action.help
        return super()._get_help_string(action)


def say_error(command: str, error: object) -> None:
    where = f"octavo {command}".strip()
    print(f"{where}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)


def checked(convert: Callable[[str], T]) -> Callable[[str], T]:

    def converter(text: str) -> T:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converter


def _value(
    convert: Callable[[str], T], rule: str, holds: Callable[[T], bool] = lambda _: True
) -> Callable[[str], T]:
    def converter(text: str) -> T:
        with contextlib.suppress(ValueError, argparse.ArgumentTypeError):
            if holds(value := convert(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")

    return converter


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")] if text.strip() else []


whole_number = _value(int, "a whole number")
number = _value(float, "a number")
positive = _value(int, "a whole number of at least 1", lambda value: 1 <= value < 2**63)
from_zero = _value(int, "a whole number of at least 0", lambda value: 0 <= value < 2**63)
seconds = _value(float, "a number of seconds, 0 or more", lambda value: 0 <= value < math.inf)
above_zero = _value(float, "a number above 0", lambda value: 0 < value < math.inf)
not_negative = _value(float, "a number of at least 0", lambda value: 0 <= value < math.inf)
counts = _value(lambda text: tuple(sorted(set(map(positive, text.split(","))))), "counts such as 1,8,32")
token_ids = _value(_ids, "token ids separated by commas, such as 1,2,3")
