"""``octavo plan``: sequences that fit into a memory budget, without loading a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.kernels.formats import FORMAT_NAMES, RECIPE, FormatPair, format_pair
from octavo.kernels.residual import RESIDUAL_SETTINGS

from ..api.config import AUTO
from ..api.size import parse_size
from ..arguments.options import (
    DEFAULTS,
    add_json_argument,
    add_settings,
    print_json,
)
from ..arguments.usage import checked, positive

if TYPE_CHECKING:
    from ..memory.draft_memory import ObservedCaches


ADAPTERS = ("lora_memory", "max_loras", "max_lora_rank")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=DEFAULTS.model, metavar="PATH|HUB_ID|demo|demo-hybrid", help="model to plan for")
    add("--memory", type=checked(parse_size), required=True, metavar="SIZE",
        help="total memory to plan for, such as 16GiB")  # fmt: skip
    add("--context", type=positive, metavar="N",
        help="length of each sequence in tokens (default: the model's maximum)")  # fmt: skip
    add("--page-size", type=positive, default=DEFAULTS.page_size, metavar="N",
        help="number of positions per page")  # fmt: skip
    add_settings(parser, ("max_kv_size", "kv_format", *RESIDUAL_SETTINGS, "speculate"))
    add_settings(parser, ADAPTERS)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    from ..memory.planner import plan, render

    result = plan(
        model=args.model,
        memory=args.memory,
        context=args.context,
        page_size=args.page_size,
        formats=_formats(args),
        residual=_residual(args),
        max_kv_size=args.max_kv_size,
        speculate=args.speculate or DEFAULTS.speculate,
        adapters={name: value for name in ADAPTERS if (value := getattr(args, name)) is not None},
        observe=_observe,
    )
    print(render(result))
    if args.json:
        print_json(result)
    return 0 if result["fits"] else 1


def _observe(path: Path) -> ObservedCaches:
    from ..executor.load.loader import observe_caches

    return observe_caches(path)


def _residual(args: argparse.Namespace) -> dict[str, int]:
    return {name: value for name in RESIDUAL_SETTINGS if (value := getattr(args, name)) is not None}


def _formats(args: argparse.Namespace) -> list[FormatPair]:
    if args.kv_format not in (None, AUTO):
        return [format_pair(args.kv_format)]
    return [format_pair(name) for name in (*FORMAT_NAMES, RECIPE)]
