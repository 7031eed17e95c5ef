"""How a field of a configuration is declared: once, for Python, the command line and the reference."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from .errors import InvalidConfig

Kind = Literal["text", "int", "float", "size", "path", "names", "switch", "formats", "milliseconds"]


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
        """InvalidConfig for a value that is none of the choices, or out of range. None is what an optional
        setting is by default."""
        if value is None and default is None:
            return
        if self.choices and value not in self.choices:
            raise InvalidConfig(f"{name} must be one of {', '.join(self.choices)}, got {value!r}")
        if self.low is None:
            return
        high = math.inf if self.high is None else self.high
        if not (self.low < value if self.above else self.low <= value) or not value <= high:
            rule = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
            if self.high is not None:
                rule += f" and at most {self.high:g}"
            unit = " seconds" if self.metavar == "SECONDS" else ""
            remedy = self.remedy or ("leave it out for the default" if default is None else "")
            raise InvalidConfig(
                f"{name} must be {rule}{unit}, got {value}" + (f"; {remedy}" if remedy else "")
            )

    def explained(self, default: Any) -> str:
        """The line for ``--help``."""
        shown = self.shown
        if shown is None:
            shown = f"{default:g}" if isinstance(default, float) else str(default)
        return f"{self.help} ({shown})" if shown else self.help


def setting(default: Any, text: str, **said: Any) -> Any:
    """A dataclass field that is a setting; ``said``: the fields of Setting."""
    return dataclasses.field(default=default, metadata={"setting": Setting(help=text, **said)})


def settings_of(config: type) -> dict[str, tuple[Setting, Any]]:
    """The settings of a configuration and their defaults, by name, in the order of declaration."""
    return {
        field.name: (field.metadata["setting"], field.default)
        for field in dataclasses.fields(config)
        if "setting" in field.metadata
    }
