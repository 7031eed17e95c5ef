"""Options from environment variables and a configuration file.

The command line takes precedence, then the variable ``OCTAVO_<NAME>``, then the file of ``--config``.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..api.errors import InvalidConfig

logger = logging.getLogger(__name__)

PREFIX = "OCTAVO_"
CONFIG_FLAG = "--config"
EPILOG = (
    "Every option can also be set by an environment variable (--kv-format: OCTAVO_KV_FORMAT) or in the file "
    'of --config (kv-format = "fp4"). The command line overrides variables, and variables override the file.'
)
_READ_ELSEWHERE = {"OCTAVO_CPU_ISA", "OCTAVO_CPU_THREADS"}
_OF_SERVICES = re.compile(
    r"OCTAVO\w*_(SERVICE_(HOST|PORT)\w*=.*|PORT=\w+://.*|PORT_\d+_(TCP|UDP|SCTP)\w*=.*)"
)
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}


@dataclass(frozen=True, slots=True)
class _Name:
    action: argparse.Action
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """Options from the environment or a file, as arguments of a command line."""

    words: list[str]
    origins: dict[str, str]


def found_options(parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str]) -> Found:
    """Return options from environment and file, except options in ``argv``. Raises InvalidConfig."""
    names = option_names(parser)
    given = _given(parser, argv)
    found = Found([], {})
    variables = {name: environ[key] for name in names if (key := _variable(name)) in environ}
    warn_of_unknown(lambda: names, environ)
    path = _config_path(argv, variables)
    for values, origin in (
        ({name: text for name, text in variables.items() if not _by_kubernetes(name, text)}, _variable),
        ({} if path is None else _read_file(path, names), lambda name: f"{name} in {path}"),
    ):
        taken: set[argparse.Action] = set()
        for name, value in values.items():
            action = names[name].action
            if action in given or action in taken or CONFIG_FLAG in action.option_strings:
                continue
            words = list(_words(names[name], value, origin(name)))
            found.words.extend(words)
            if words:
                found.origins[action.option_strings[0]] = origin(name)
            taken |= {action, *_rivals(parser, action)}
        given |= taken
    return found


def option_names(parser: argparse.ArgumentParser) -> dict[str, _Name]:
    names: dict[str, _Name] = {}
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        for option in action.option_strings:
            if not option.startswith("--"):
                continue
            no = isinstance(action, argparse.BooleanOptionalAction) and option.startswith("--no-")
            names[option.removeprefix("--")] = _Name(action, negated=no)
            if action.nargs == 0 and option.startswith("--no-"):
                names.setdefault(option.removeprefix("--no-"), _Name(action, negated=True))
    return names


def _variable(name: str) -> str:
    return PREFIX + name.upper().replace("-", "_")


def _given(parser: argparse.ArgumentParser, argv: Sequence[str]) -> set[argparse.Action]:
    words = {word.partition("=")[0] for word in argv if word.startswith("--")}
    actions = {action for action in parser._actions if words & set(action.option_strings)}
    return actions | {rival for action in actions for rival in _rivals(parser, action)}


def _rivals(parser: argparse.ArgumentParser, action: argparse.Action) -> set[argparse.Action]:
    groups = [group._group_actions for group in parser._mutually_exclusive_groups]
    return {rival for actions in groups if action in actions for rival in actions}


def _by_kubernetes(name: str, text: str) -> bool:
    if name == "port" and "://" in text:
        logger.warning("%s=%s is a Kubernetes service address and is ignored", _variable(name), text)
        return True
    return False


def warn_of_unknown(options: Callable[[], Iterable[str]], environ: Mapping[str, str]) -> None:
    """Log a warning for each variable ``OCTAVO_...`` that sets no option."""
    ours = {name for name in environ if name.startswith(PREFIX)} - _READ_ELSEWHERE
    ours = {name for name in ours if not _OF_SERVICES.fullmatch(f"{name}={environ[name]}")}
    known = {_variable(name) for name in (options() if ours else ())} | _READ_ELSEWHERE
    for variable in sorted(ours - known):
        endings = [name.removeprefix(PREFIX) for name in known]
        near = difflib.get_close_matches(variable.removeprefix(PREFIX), endings, n=1)
        remedy = f"did you mean {PREFIX}{near[0]}?" if near else "see `octavo serve --help` for the options"
        logger.warning("%s is not an option of octavo serve and is ignored; %s", variable, remedy)


def _config_path(argv: Sequence[str], variables: Mapping[str, str]) -> Path | None:
    name = CONFIG_FLAG.removeprefix("--")
    text = variables.get(name)
    for index, word in enumerate(argv):
        if word.startswith(f"{CONFIG_FLAG}="):
            text = word.partition("=")[2]
        elif word == CONFIG_FLAG and index + 1 < len(argv):
            text = argv[index + 1]
    return Path(text) if text else None


def _read_file(path: Path, names: Mapping[str, _Name]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(
            f"{CONFIG_FLAG} {path} cannot be read: {error.strerror}; give a TOML file"
        ) from error
    except RecursionError as error:
        raise InvalidConfig(
            f"{CONFIG_FLAG} {path} must not nest values that deep; write each option at the top level"
        ) from error
    except ValueError as error:
        raise InvalidConfig(f"{CONFIG_FLAG} {path} is not TOML: {error}") from error
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("_", "-")
        if name not in names:
            raise InvalidConfig(f"{key!r} in {path} is not an option; {_nearest(name, names)}")
        if name in values:
            raise InvalidConfig(f"{key!r} in {path} sets {name} a second time; remove one of the two")
        values[name] = value
    return values


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {near[0]!r}?" if near else "see `octavo serve --help` for the options"


def _words(name: _Name, value: Any, origin: str) -> Iterator[str]:
    option = name.action.option_strings[0]
    if name.action.nargs == 0:
        if _truth(value, origin) != name.negated:
            yield option
        elif isinstance(name.action, argparse.BooleanOptionalAction):
            yield name.action.option_strings[-1]
        return
    several = name.action.nargs == "+"
    values = value if isinstance(value, list) else str(value).split(",") if several else [value]
    if (not several and len(values) != 1) or any(isinstance(one, dict | list) for one in values):
        raise InvalidConfig(
            f"{origin} must be {'a list of values' if several else 'one value'}, got {value!r}"
        )
    for one in values:
        if isinstance(one, bool):
            raise InvalidConfig(f"{origin} must be a value for {option}, got {str(one).lower()}")
        text = str(one).strip() if several else str(one)
        if several:
            yield from (option, text)
        else:
            yield f"{option}={text}"


def _truth(value: Any, origin: str) -> bool:
    text = str(value).strip().lower()
    if text not in _TRUE | _FALSE:
        raise InvalidConfig(f"{origin} must be 1 or 0 (true or false), got {value!r}")
    return text in _TRUE
