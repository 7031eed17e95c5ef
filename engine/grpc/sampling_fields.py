from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from octavo.proto import generation_pb2 as pb

from ..api.errors import InvalidRequest
from ..api.sampling_params import PARAMETERS, SamplingParams
from ..api.structured_output import StructuredOutput

MAX_ITEMS = 2048  # entries of one list or mapping


class SamplingFields:
    """Reads and writes the sampling parameters of a message type."""

    def __init__(self, message: Any, *, vllm: bool = False) -> None:
        names = {
            (declared.vllm if vllm else None) or name: name for name, (declared, _) in PARAMETERS.items()
        }
        self._parameters: Mapping[str, tuple[str, Callable[[Any], Any] | None]] = {
            field: (name, _CONVERTED.get(PARAMETERS[name][0].kind))
            for field, name in names.items()
            if field in message.fields_by_name and name != "structured"
        }

    def read(self, message: Message) -> dict[str, Any]:
        """Return the set fields as arguments of SamplingParams. Raises InvalidRequest for long lists."""
        given = {}
        for field, value in message.ListFields():
            if (parameter := self._parameters.get(field.name)) is not None:
                name, converted = parameter
                if converted is not None and len(value) > MAX_ITEMS:
                    raise InvalidRequest(
                        f"{name} must have at most {MAX_ITEMS} entries, got {len(value)}; send fewer"
                    )
                given[name] = value if converted is None else converted(value)
        return given

    def write(self, params: SamplingParams) -> dict[str, Any]:
        return {
            field: value if converted is None else converted(value)
            for field, (name, converted) in self._parameters.items()
            if (value := getattr(params, name)) is not None
        }


_CONVERTED: Mapping[str, Callable[[Any], Any]] = {"texts": tuple, "ints": tuple, "biases": dict}


_CONSTRAINTS = ("json_schema", "json_object", "regex", "grammar", "structural_tag")


def structured_of(kind: str | None, value: Any) -> StructuredOutput | None:
    """Return the constraint in a field of a message. Raises InvalidRequest for an unsupported field."""
    if kind is None or (kind == "json_object" and not value):
        return None
    if kind == "choice":
        if not value.choices:
            raise InvalidRequest("choice has no strings; give at least one")
        return StructuredOutput(choice=tuple(value.choices))
    if kind not in _CONSTRAINTS:
        raise InvalidRequest(f"{kind} is not supported by this server; leave it out")
    return StructuredOutput(**{kind: value})


def structured_message(structured: StructuredOutput) -> pb.Structured:
    if structured.choice:
        return pb.Structured(choice=pb.Choice(choices=structured.choice))
    if structured.json_object:
        return pb.Structured(json_object=True)
    message = pb.Structured()
    setattr(message, structured.kind, structured.source)
    return message
