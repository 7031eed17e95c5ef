from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ..api.errors import InvalidConfig
from .sources import DELETED, EPILOG, found_options

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
            option = unknown[0].partition("=")[0]
            if (now := DELETED.get(option.removeprefix("--"))) is not None:
                self.error(f"{option} is not an option any more; {now}")
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


def whole_number(text: str) -> int:
    return _read(int, text, "a whole number")


def number(text: str) -> float:
    """Parse a number for argparse; infinity and NaN are allowed."""
    return _read(float, text, "a number")


def _read(convert: Callable[[str], T], text: str, rule: str) -> T:
    try:
        return convert(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}") from None


def positive(text: str) -> int:
    return _at_least(1, text)


def from_zero(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    value = int(text) if text.strip().lstrip("+-").isdigit() else -1
    if not least <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Parse counts such as "1,8,32"; return them sorted, without duplicates."""
    try:
        return tuple(sorted({positive(part) for part in text.split(",")}))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be counts such as 1,8,32, got {text!r}") from None


def seconds(text: str) -> float:
    return _number(text, "a number of seconds, 0 or more")


def above_zero(text: str) -> float:
    return _number(text, "a number above 0", may_be_zero=False)


def not_negative(text: str) -> float:
    return _number(text, "a number of at least 0")


def _number(text: str, rule: str, *, may_be_zero: bool = True) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or not (value or may_be_zero):
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
    return value


def token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be token ids separated by commas, such as 1,2,3, got {text!r}"
        ) from None
