"""Options that say what an output must look like."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..api.errors import InvalidRequest
from ..api.structured_output import StructuredOutput


def add_structured_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structured output", "what the output must look like; one of these")
    add = group.add_argument
    add("--json-schema", type=Path, metavar="FILE", help="JSON that validates against this schema")
    add("--json-object", action="store_true", help="any JSON object")
    add("--regex", metavar="R", help="text that matches this pattern as a whole")
    add("--grammar", type=Path, metavar="FILE", help="text of this grammar: EBNF (GBNF) or Lark")
    add("--choice", action="append", default=[], metavar="S", help="one of these strings; repeatable")


def structured_of(args: argparse.Namespace) -> StructuredOutput | None:
    """Return the structured output of the options; InvalidRequest when they contradict or a file cannot be
    read."""
    if not (args.json_schema or args.json_object or args.regex is not None or args.grammar or args.choice):
        return None
    return StructuredOutput(
        json_schema=_read("--json-schema", args.json_schema),
        json_object=args.json_object,
        regex=args.regex,
        grammar=_read("--grammar", args.grammar),
        choice=tuple(args.choice),
    )


def _read(flag: str, path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{flag}: cannot read {path} ({error}); give a text file") from error
