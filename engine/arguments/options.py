from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from octavo.block_manager import ResidualWindow
from octavo.kernels.formats import FORMAT_NAMES, known_formats

from ..api.config import AUTO, EngineConfig
from ..api.engine_info import EngineInfo
from ..api.sampling_params import PARAMETERS
from ..api.setting import Setting, settings_of
from ..api.setting_types import split_pair
from ..api.size import parse_size
from .usage import checked, number, whole_number

DEFAULTS = EngineConfig()
_SETTINGS = settings_of(EngineConfig)
_GROUPS = {
    "model": "model",
    "kv_format": "KV cache",
    "max_model_len": "lengths",
    "max_running": "scheduling and limits",
    "speculate": "speculation and overlap",
    "prefix_cache": "prefix cache",
    "schedule_policy": "tenants",
    "cache_dir": "memory and disk outside the page pool",
}
_PARAMETERS = {
    name: (declared, default)
    for name, (declared, default) in PARAMETERS.items()
    if declared.flag != "" and name not in _SETTINGS
}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one option per setting of EngineConfig. All defaults are None."""
    names = list(_SETTINGS)
    starts = [names.index(name) for name in _GROUPS]
    for heading, (begin, end) in zip(
        _GROUPS.values(), itertools.pairwise([*starts, len(names)]), strict=True
    ):
        add_settings(parser.add_argument_group(heading), names[begin:end])


def add_settings(group: argparse._ActionsContainer, names: Iterable[str]) -> None:
    """Add options for the named settings of EngineConfig. All defaults are None."""
    exclusive: dict[str, argparse._ActionsContainer] = {}
    for name in names:
        declared, default = _SETTINGS[name]
        to = group
        if declared.exclusive is not None:
            if declared.exclusive not in exclusive:
                exclusive[declared.exclusive] = group.add_mutually_exclusive_group()
            to = exclusive[declared.exclusive]
        _add_option(to, _flag(name), name, declared, default)


def add_sampling_arguments(group: argparse._ActionsContainer, **defaults: Any) -> None:
    """Add one option per sampling parameter. All defaults are None."""
    for name, (declared, default) in _PARAMETERS.items():
        option = dataclasses.replace(declared, shown=str(defaults[name])) if name in defaults else declared
        _add_option(group, declared.flag or _flag(name), name, option, default)


def sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: value for name in _PARAMETERS if (value := getattr(args, name)) is not None}
    return {
        name: dict(value) if _PARAMETERS[name][0].kind == "biases" else value for name, value in given.items()
    }


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_option(
    group: argparse._ActionsContainer, flag: str, name: str, declared: Setting, default: Any
) -> None:
    if declared.kind == "switch":
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    elif declared.kind == "names":
        how = {"action": _Several, "nargs": "+"}
    elif declared.kind == "pairs":
        how = {"action": _Several, "nargs": "+", "type": checked(pair)}
    elif declared.kind in ("texts", "ints"):
        how = {"action": _Several, "type": whole_number if declared.kind == "ints" else str}
    elif declared.kind == "biases":
        how = {"action": _Several, "type": _bias}
    else:
        how = {"type": _PARSERS[declared.kind], "choices": declared.choices or None}
    if declared.metavar is not None:
        how["metavar"] = declared.metavar
    text = declared.explained(default).replace("%", "%%")
    group.add_argument(flag, *declared.aliases, dest=name, default=None, help=text, **how)


class _Several(argparse.Action):
    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        _option: Any = None,
    ) -> None:
        given = values if isinstance(values, list) else (values,)
        if len(given) > 1 and self.type is None:
            namespace.after_one_option = given
        setattr(namespace, self.dest, (*(getattr(namespace, self.dest) or ()), *given))


def pair(text: str) -> str:
    split_pair(text)
    return text


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a token id and a number, such as 42=-1.5, got {text!r}"
        ) from None


VLLM_FORMATS = {"bfloat16": "bf16", "float16": "fp16"}


def _formats(name: str) -> str:
    name = VLLM_FORMATS.get(name, name)
    if name != AUTO and not known_formats(name):
        raise argparse.ArgumentTypeError(
            f"must be a page format, got {name!r}; use auto, {', '.join(FORMAT_NAMES)}, or two, written K/V"
        )
    return name


def _target_itl(text: str) -> float | str:
    if text in ("auto", "off"):
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be milliseconds, auto or off, got {text!r}") from None


_PARSERS: dict[str, Callable[[str], Any] | None] = {
    "text": None,
    "int": whole_number,
    "float": number,
    "path": None,
    "size": checked(functools.partial(parse_size, least=0)),
    "formats": _formats,
    "milliseconds": _target_itl,
}


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name in _SETTINGS if (value := getattr(args, name)) is not None}


def engine_flags(settings: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is False:
            flags.append(flag.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            flags += [flag, *map(str, value)]
        else:
            flags += [flag, str(value)]
    return flags


def engine_config(args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """Build the engine configuration. ``defaults`` apply to missing options. Raises InvalidConfig."""
    return EngineConfig(**defaults | given_settings(args))


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print the result as one JSON object in the last line"
    )


def add_log_level_argument(parser: argparse.ArgumentParser, default: str) -> None:
    levels = ("debug", "info", "warning", "error", "critical")
    parser.add_argument("--log-level", choices=levels, default=default, type=str.lower,
        help="least severe level of messages that are logged to stderr")  # fmt: skip


def set_up_logging(args: argparse.Namespace) -> None:
    logging.basicConfig(
        level=args.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def budget_lines(info: EngineInfo) -> list[str]:
    from ..memory.budget import format_size

    memory, states = info.memory, info.states
    windows = "".join(
        f"{group.num_pages} for windows of {group.window} positions, "
        if not isinstance(group, ResidualWindow)
        else f"{group.num_pages} 16-bit pages, "
        for group in info.groups[1:]
    )
    pages = f" ({info.num_pages} of {info.page_size} positions, {windows}{info.kv_format})"
    slots = "" if states is None else f" ({states.num_slots} slots of {format_size(states.slot_bytes)})"
    parts = {
        "weights": (memory.weights, ""),
        "pages": (memory.pages, pages),
        "pages for drafts": (memory.drafts, ""),
        "states": (memory.states, slots),
        "adapters": (memory.adapters, ""),
        "vision": (memory.vision, ""),
        "workspace": (memory.workspace, ""),
    }
    total = format_size(sum(size for size, _ in parts.values()))
    shown = [
        f"{name} {format_size(size)}{more}"
        for name, (size, more) in parts.items()
        if size or name in ("weights", "pages", "workspace")
    ]
    return [
        f"model {info.name} ({info.architecture}, {info.num_layers} layers, {info.weights} weights), "
        f"length up to {info.max_model_len}" + (f"; recurrent: {info.recurrent}" if info.recurrent else ""),
        f"backend {info.backend} with {info.threads} threads: {info.backend_reason}",
        f"memory {total}: {', '.join(shown)}",
        *(
            f"rank {rank}: weights {format_size(other.weights)}, pages {format_size(other.pages)}"
            for rank, other in enumerate(info.other_ranks, start=1)
        ),
    ]
