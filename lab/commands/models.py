"""``octavo models``: all architectures of the installed mlx-lm, and how they are served."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, get_args

from octavo.engine.api.config import Backend
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.arguments.options import add_json_argument, print_json

if TYPE_CHECKING:
    from ..architectures.examine import Examined

LONGEST_REASON = 160  # characters in the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="modules of mlx_lm.models (default: all)")
    parser.add_argument(
        "--backend", choices=get_args(Backend), default="auto", help="backend on which to try the models"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the Markdown table of docs/architectures.md"
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    from ..architectures.examine import architectures
    from ..architectures.survey import survey

    known = architectures()
    if unknown := sorted(set(args.names) - set(known)):
        raise InvalidConfig(
            f"architecture {unknown[0]!r} is not in the installed mlx-lm; `octavo models` lists all"
        )
    found = []
    for examined in survey(args.names or known, backend=args.backend):
        found.append(examined)
        if not args.markdown:
            print(line_of(examined), flush=True)
    for line in markdown(found) if args.markdown else ():
        print(line)
    counts = Counter(examined.tier for examined in found)
    if not args.markdown:
        print(", ".join(f"{count} {tier}" for tier, count in counts.most_common()))
    if args.json:
        print_json({"architectures": [asdict(examined) for examined in found], "counts": dict(counts)})
    return 0


def line_of(examined: Examined) -> str:
    size = "" if examined.bytes_per_token is None else f"{examined.bytes_per_token} B/token"
    what = f"{examined.architecture:24} {examined.tier:9} {examined.attention:14} {size:12}"
    return f"{what} {_shortened(examined.reason)}".rstrip()


def markdown(found: Sequence[Examined]) -> Iterator[str]:
    """Yield the lines of the table in docs/architectures.md."""
    yield "| architecture | tier | attention | bytes per token | why not paged |"
    yield "| --- | --- | --- | --- | --- |"
    for examined in found:
        reason = _shortened(examined.reason).replace("|", "\\|")
        yield (
            f"| `{examined.architecture}` | {examined.tier} | {examined.attention} | "
            f"{examined.bytes_per_token or ''} | {reason} |"
        )


def _shortened(reason: str) -> str:
    return reason if len(reason) <= LONGEST_REASON else f"{reason[: LONGEST_REASON - 3]}..."
