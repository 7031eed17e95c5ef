"""Declaration of a field of a configuration or request: once, for Python, the command line, the wire
and the reference."""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from .errors import InvalidConfig, InvalidRequest
from .setting_types import Kind, in_its_type

_UNSET = (None, False, "off")
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100
_quoted = _REPR.repr  # what was given, cut before it is copied
_UNITS = {"SECONDS": " seconds", "MS": " milliseconds"}  # by metavar


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Description of a field besides its type and default.

    help       one line, as ``--help`` has it; the default is added in brackets
    shown      how the default reads there (None: as it is; "": not at all)
    more       what the reference says beyond that
    kind       how a text becomes a value; "switch": the option has none, and there are two, --x and --no-x
    metavar    stands for the value in ``--help``
    choices    the values there are (none: any)
    low, high  the range of a number (None: unbounded); ``above``: low itself is outside
    remedy     ends the message about a value that is not usable
    aliases    further spellings of the option, vLLM's above all
    exclusive  settings of one such name exclude each other
    needs      the setting without which this one does nothing
    optional   None is a value, as the field's annotation says
    """

    help: str
    shown: str | None = None
    more: str = ""
    kind: Kind = "text"
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    above: bool = False
    remedy: str = ""
    aliases: tuple[str, ...] = ()
    exclusive: str | None = None
    needs: str | None = None
    optional: bool = False

    def taken(self, name: str, value: Any, default: Any) -> Any:
        """The value in the setting's own type; ValueError says what is wrong with one that is not usable:
        of another type, none of the choices, or out of range."""
        if value is default or (value is None and self.optional):
            return value
        remedy = self.remedy or ("leave it out for the default" if default is None or value is None else "")
        if self.choices:
            if value not in self.choices:
                raise ValueError(f"{name} must be one of {', '.join(self.choices)}, got {_quoted(value)}")
            return value
        try:
            taken = in_its_type(self.kind, value)
        except TypeError as kept:
            if isinstance(value, str) and self.kind in (
                "names",
                "texts",
                "pairs",
            ):  # of which each letter is one
                remedy = f"write ({value!r},)"
            raise ValueError(_refusal(name, str(kept), _quoted(value), remedy)) from None
        if self.low is not None and not self._holds(taken):
            rule = f"{self._range()}{_UNITS.get(self.metavar or '', '')}"
            raise ValueError(_refusal(name, rule, str(value), remedy))
        return taken

    def _holds(self, value: float) -> bool:
        assert self.low is not None
        above = self.low < value if self.above else self.low <= value  # NaN is neither
        return above and (value < math.inf if self.high is None else value <= self.high)

    def _range(self) -> str:
        low, high = (f"{end:g}" if isinstance(end, float) else str(end) for end in (self.low, self.high))
        if self.high is None:
            return f"above {low}" if self.above else f"at least {low}"
        return f"above {low} and at most {high}" if self.above else f"between {low} and {high}"

    def explained(self, default: Any) -> str:
        """The line for ``--help``."""
        shown = self.shown
        if shown is None:
            shown = f"{default:g}" if isinstance(default, float) else str(default)
        return f"{self.help} ({shown})" if shown else self.help


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter(Setting):
    """A sampling parameter: a setting of one request.

    flag         its option of ``octavo generate``, where that is not its name; "": it has none
    vllm         its field in vLLM's gRPC message, where that is not its name
    recommended  a model's generation_config.json may say what it is by default
    """

    flag: str | None = None
    vllm: str | None = None
    recommended: bool = False


def setting(default: Any, text: str, **said: Any) -> Any:
    """A dataclass field that is a setting; ``said``: the fields of Setting."""
    return _field(default, Setting(help=text, **said))


def parameter(default: Any, text: str, **said: Any) -> Any:
    """A dataclass field that is a sampling parameter; ``said``: the fields of Parameter."""
    return _field(default, Parameter(help=text, **said))


def _field(default: Any, declared: Setting) -> Any:
    metadata = {"setting": declared}
    if isinstance(default, Mapping):  # dataclasses take it for a mutable one
        return dataclasses.field(default_factory=lambda: default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def settings_of(config: type) -> dict[str, tuple[Any, Any]]:
    """The settings of a configuration (or the parameters of a request) and their defaults, by name, in the
    order of declaration."""
    hints = typing.get_type_hints(config)
    return {
        field.name: (
            dataclasses.replace(
                field.metadata["setting"], optional=NoneType in typing.get_args(hints[field.name])
            ),
            default_of(field),
        )
        for field in dataclasses.fields(config)
        if "setting" in field.metadata
    }


def take_settings(config: Any, error: type[InvalidConfig | InvalidRequest]) -> None:
    """Bring every setting of a configuration that is being made into its own type; ``error`` names the first
    that is not usable."""
    for name, (declared, default) in settings_of(config.__class__).items():
        given = getattr(config, name)
        try:
            taken = declared.taken(name, given, default)
        except ValueError as reason:
            raise error(str(reason)) from None
        if taken is not given:
            object.__setattr__(config, name, taken)
        if (needed := declared.needs) and taken != default and getattr(config, needed) in _UNSET:
            raise error(_refusal(name, f"left out without {needed}", str(taken), f"set {needed}, too"))


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field; dataclasses.MISSING if it must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _refusal(name: str, rule: str, value: str, remedy: str) -> str:
    return f"{name} must be {rule}, got {value}" + (f"; {remedy}" if remedy else "")
