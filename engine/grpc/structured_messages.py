"""Conversion between the constraint fields of both services and StructuredOutput."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from octavo.proto import generation_pb2 as pb

from ..api.errors import InvalidRequest
from ..api.structured_output import StructuredOutput


class _Choice(Protocol):
    @property
    def choices(self) -> Iterable[str]: ...


def structured_of(kind: str | None, value: str | bool | _Choice | None) -> StructuredOutput | None:
    """Return the constraint of a message's oneof field ``kind``; None if none is set."""
    match kind, value:
        case None, _:
            return None
        case "json_object", bool():
            return StructuredOutput(json_object=value) if value else None
        case "choice", _:
            choices = tuple(value.choices)  # type: ignore[union-attr]
            if not choices:
                raise InvalidRequest("choice has no strings; give at least one")
            return StructuredOutput(choice=choices)
        case ("json_schema", str()):
            return StructuredOutput(json_schema=value)
        case ("regex", str()):
            return StructuredOutput(regex=value)
        case ("grammar", str()):
            return StructuredOutput(grammar=value)
        case ("structural_tag", str()):
            return StructuredOutput(structural_tag=value)
    raise InvalidRequest(f"{kind} is not supported by this server; leave it out")


def structured_message(structured: StructuredOutput) -> pb.Structured:
    """Return a constraint as a message, for clients."""
    if structured.choice:
        return pb.Structured(choice=pb.Choice(choices=structured.choice))
    if structured.json_object:
        return pb.Structured(json_object=True)
    message = pb.Structured()
    setattr(message, structured.kind, structured.source)
    return message
