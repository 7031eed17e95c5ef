"""Sampling parameters in the messages of both services: each travels in the field of its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from ..api.errors import InvalidRequest
from ..api.sampling_params import PARAMETERS, SamplingParams

MAX_ITEMS = 2048  # of a list or a mapping, each of which is looked at on the event loop


class SamplingFields:
    """Reads and writes the parameters for which a message has a field.

    What is not set keeps the default of SamplingParams. That is a field that was left out, or, where the
    field cannot tell (proto3 without ``optional``), one that is 0 or empty.
    """

    def __init__(self, message: Any, *, vllm: bool = False) -> None:
        """Read messages of this descriptor; ``vllm``: they name their fields as vLLM does."""
        names = {
            (declared.vllm if vllm else None) or name: name for name, (declared, _) in PARAMETERS.items()
        }
        self._parameters: Mapping[str, tuple[str, Callable[[Any], Any] | None]] = {
            field: (name, _CONVERTED.get(PARAMETERS[name][0].kind))
            for field, name in names.items()
            if field in message.fields_by_name and name != "structured"  # which has messages of its own
        }

    def read(self, message: Message) -> dict[str, Any]:
        """Arguments of SamplingParams: what the message has set. InvalidRequest for a list of more than
        ``MAX_ITEMS``, before anything is made of it."""
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
        """Arguments of the message: all but what is None."""
        return {
            field: value if converted is None else converted(value)
            for field, (name, converted) in self._parameters.items()
            if (value := getattr(params, name)) is not None
        }


_CONVERTED: Mapping[str, Callable[[Any], Any]] = {"texts": tuple, "ints": tuple, "biases": dict}
