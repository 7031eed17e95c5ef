from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
import typing
from dataclasses import dataclass
from types import NoneType
from typing import Any

from .errors import InvalidConfig, InvalidRequest
from .setting_types import Kind, in_its_type

_UNSET = (None, False, "off")
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100
_quoted = _REPR.repr
_UNITS = {"SECONDS": " seconds", "MS": " milliseconds"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Declaration of one setting.

    shown      default as shown in ``--help`` (None: the value itself)
    more       additional sentences for the reference page
    kind       type of the value; "switch" has the options --x and --no-x
    low, high  inclusive range of a number (None: unbounded)
    remedy     end of the error message, which tells the user what to do
    aliases    alternative option names, mostly vLLM's
    needs      another setting that must be set if this one is
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

    def parse(self, name: str, value: Any, default: Any) -> Any:
        """Convert and check a value. Raises ValueError if its type or range is wrong."""
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
            if isinstance(value, str) and self.kind in ("names", "texts", "pairs"):
                remedy = f"write ({value!r},)"
            raise ValueError(_refusal(name, str(kept), _quoted(value), remedy)) from None
        if self.low is not None and not self._holds(taken):
            rule = f"{self._range()}{_UNITS.get(self.metavar or '', '')}"
            raise ValueError(_refusal(name, rule, str(value), remedy))
        return taken

    def _holds(self, value: float) -> bool:
        assert self.low is not None
        above = self.low < value if self.above else self.low <= value
        return above and (value < math.inf if self.high is None else value <= self.high)

    def _range(self) -> str:
        low, high = (f"{end:g}" if isinstance(end, float) else str(end) for end in (self.low, self.high))
        if self.high is None:
            return f"above {low}" if self.above else f"at least {low}"
        return f"above {low} and at most {high}" if self.above else f"between {low} and {high}"

    def explained(self, default: Any) -> str:
        shown = self.shown
        if shown is None:
            shown = f"{default:g}" if isinstance(default, float) else str(default)
        return f"{self.help} (default: {shown})" if shown else self.help


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter(Setting):
    """A setting of one request.

    flag         option of ``octavo generate``, if it differs from the name
    vllm         field of vLLM's gRPC message, if it differs from the name
    recommended  whether the model's generation_config.json may set the default
    """

    flag: str | None = None
    vllm: str | None = None
    recommended: bool = False


def setting(default: Any, text: str, **said: Any) -> Any:
    return _field(default, Setting(help=text, **said))


def parameter(default: Any, text: str, **said: Any) -> Any:
    return _field(default, Parameter(help=text, **said))


def _field(default: Any, declared: Setting) -> Any:
    metadata = {"setting": declared}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def settings_of(config: type) -> dict[str, tuple[Any, Any]]:
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
    """Convert and check every setting of ``config`` in place. Raises ``error`` for an invalid value."""
    for name, (declared, default) in settings_of(config.__class__).items():
        given = getattr(config, name)
        try:
            taken = declared.parse(name, given, default)
        except ValueError as reason:
            raise error(str(reason)) from None
        if taken is not given:
            object.__setattr__(config, name, taken)
        if (needed := declared.needs) and taken != default and getattr(config, needed) in _UNSET:
            raise error(_refusal(name, f"left out without {needed}", str(taken), f"set {needed}, too"))


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default, or dataclasses.MISSING if the field is required."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _refusal(name: str, rule: str, value: str, remedy: str) -> str:
    return f"{name} must be {rule}, got {value}" + (f"; {remedy}" if remedy else "")
