"""Options for structured output."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..api.errors import InvalidRequest
from ..api.structured_output import StructuredOutput


def add_structured_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structured output", "structured output (at most one of these)")
    add = group.add_argument
    add("--json-schema", type=Path, metavar="FILE", help="JSON schema that the output must validate against")
    add("--json-object", action="store_true", help="make the output a JSON object")
    add("--regex", metavar="R", help="regular expression that the whole output must match")
    add("--grammar", type=Path, metavar="FILE", help="grammar of the output, in EBNF (GBNF) or Lark notation")
    add("--choice", action="append", default=[], metavar="S",
        help="string that the output may be; repeat it for each choice")  # fmt: skip


def structured_of(args: argparse.Namespace) -> StructuredOutput | None:
    """Return the structured output of the options. Raises InvalidRequest for conflicting options or an
    unreadable file."""
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
