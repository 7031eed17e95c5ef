from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from .events import CallArguments, CallBegin, CallEnd
from .text_source import Malformed

Tools: TypeAlias = Sequence[Mapping[str, Any]]  # in OpenAI's format
IdStyle: TypeAlias = Literal["call", "short"]
_ALPHABET = string.ascii_letters + string.digits


class CallWriter:
    def __init__(self, tools: Tools, id_style: IdStyle = "call") -> None:
        self.tools = tools
        self.name: str | None = None
        self._id_style = id_style
        self._index = -1
        self._written: list[str] = []

    @property
    def open_index(self) -> int | None:
        return None if self.name is None else self._index

    @property
    def num_calls(self) -> int:
        return self._index + 1

    def give_up(self) -> None:
        self.name = None

    def begin(self, name: str, call_id: str | None = None) -> CallBegin:
        """Begin a call. Raises Malformed if the name is empty."""
        if not name:
            raise Malformed
        self._index += 1
        self.name, self._written = name, []
        return CallBegin(self._index, call_id or new_id(self._id_style), name)

    def arguments(self, text: str) -> CallArguments:
        self._written.append(text)
        return CallArguments(self._index, text)

    def end(self) -> CallEnd:
        """End a call. Raises Malformed unless its arguments are one JSON object."""
        if not isinstance(self.loaded(), dict):
            raise Malformed
        self.name = None
        return CallEnd(self._index)

    def loaded(self) -> object:
        """Return the parsed arguments. Raises Malformed if they are not JSON."""
        try:
            return json.loads("".join(self._written))
        except ValueError:
            raise Malformed from None

    def whole(
        self, name: str, arguments: Any, call_id: str | None = None
    ) -> Iterator[CallBegin | CallArguments | CallEnd]:
        if not isinstance(arguments, Mapping):
            raise Malformed
        yield self.begin(name, call_id)
        yield self.arguments(as_json(arguments))
        yield self.end()

    def parameters(self, name: str) -> Mapping[str, Any]:
        """Return the schema of a tool's arguments; empty for an unknown tool."""
        for tool in self.tools:
            function = tool.get("function", {})
            if function.get("name") == name:
                found = function.get("parameters")
                return found if isinstance(found, Mapping) else {}
        return {}

    @property
    def tool_names(self) -> frozenset[str]:
        return frozenset(str(tool.get("function", {}).get("name")) for tool in self.tools)


def new_id(style: IdStyle = "call") -> str:
    """Return a new call id. Mistral's templates require the style "short"."""
    if style == "short":
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise Malformed from None
