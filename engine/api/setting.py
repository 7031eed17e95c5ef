"""How a field of a configuration or of a request is declared: once, for Python, the command line, the wire
and the reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .errors import InvalidConfig

Kind = Literal[
    "text", "int", "float", "size", "path", "names", "switch", "formats", "milliseconds",
    "texts", "ints", "biases", "structured",
]  # fmt: skip
_UNITS = {"SECONDS": " seconds", "MS": " milliseconds"}  # by metavar


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is said of a field beside its type and default.

    help       one line, as ``--help`` has it; the default is added in brackets
    shown      how the default reads there (None: as it is; "": not at all)
    more       what the reference says beyond that
    kind       how a text becomes a value; "switch": the option has none, and gives what is not the default
    metavar    stands for the value in ``--help``
    choices    the values there are (none: any)
    low, high  the range of a number (None: unbounded); ``above``: low itself is outside
    remedy     ends the message about a value that is not usable
    aliases    further spellings of the option, vLLM's above all
    exclusive  settings of one such name exclude each other
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

    def check(self, name: str, value: Any, default: Any) -> None:
        """InvalidConfig for a value that is not usable."""
        if (reason := self.refusal(name, value, default)) is not None:
            raise InvalidConfig(reason)

    def refusal(self, name: str, value: Any, default: Any) -> str | None:
        """What is wrong with a value that is none of the choices, or out of range. None is what an
        optional setting is by default."""
        if value is None and default is None:
            return None
        if self.choices and value not in self.choices:
            return f"{name} must be one of {', '.join(self.choices)}, got {value!r}"
        if self.low is None:
            return None
        above = self.low < value if self.above else self.low <= value  # NaN is neither
        if above and (value < math.inf if self.high is None else value <= self.high):
            return None
        remedy = self.remedy or ("leave it out for the default" if default is None else "")
        rule = f"{name} must be {self._range()}{_UNITS.get(self.metavar or '', '')}, got {value}"
        return f"{rule}; {remedy}" if remedy else rule

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


def settings_of(config: type) -> dict[str, tuple[Any, Any]]:
    """The settings of a configuration (or the parameters of a request) and their defaults, by name, in the
    order of declaration."""
    return {
        field.name: (field.metadata["setting"], default_of(field))
        for field in dataclasses.fields(config)
        if "setting" in field.metadata
    }


def default_of(field: dataclasses.Field[Any]) -> Any:
    """What a field is when it is not given; dataclasses.MISSING if it must be."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
