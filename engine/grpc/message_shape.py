"""Limit on the number of fields in a raw message, checked before parsing.

Parsing takes up to 50 bytes per field, so a megabyte of empty chat messages would become 26 MB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from ..api.errors import InvalidRequest
from .packed_ids import CARRIER, NO_END

Parse: TypeAlias = Callable[[bytes], Any]

MAX_FIELDS = 10_000  # fields of one message, including nested messages
SHORT_MESSAGE = 2 * MAX_FIELDS  # bytes; shorter messages never exceed MAX_FIELDS
PROMPTS = frozenset(
    (
        "octavo.v1.TokenIds.ids",
        "octavo.v1.DetokenizeRequest.token_ids",
        "vllm.grpc.engine.TokenizedInput.input_ids",
    )
)
_FIXED = {1: 8, 5: 4}


def parsed(data: bytes, parse: Parse) -> Any:
    """Parse a message. Raises InvalidRequest if it is malformed or has more than ``MAX_FIELDS`` fields."""
    if len(data) > SHORT_MESSAGE and (descriptor := _descriptor(parse)) is not None:
        key = _check_fields(data, descriptor)
        if key is not None:
            seen = memoryview(data)
            data = b"".join((seen[:key], bytes((CARRIER << 3 | 2,)), seen[key + 1 :]))
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidRequest(f"the message cannot be parsed: {error}") from error


def _descriptor(parse: Parse) -> Descriptor | None:
    descriptor: Descriptor | None = getattr(getattr(parse, "__self__", None), "DESCRIPTOR", None)
    return descriptor


def _check_fields(data: bytes, descriptor: Descriptor) -> int | None:
    count, has_prompt = 0, False
    found: int | None = None
    parts: list[tuple[int, int, Descriptor]] = [(0, len(data), descriptor)]
    while parts:
        at, end, described = parts.pop()
        fields = described.fields_by_number
        while at < end:
            count += 1
            key_at = at
            key, at = _varint(data, at, end)
            kind = key & 7
            if kind == 0:
                _, at = _varint(data, at, end)
            elif kind == 2:
                size, at = _varint(data, at, end)
                inner = None if (field := fields.get(key >> 3)) is None else field.message_type
                if field is not None and field.is_packed:
                    if field.full_name not in PROMPTS or has_prompt:
                        count += len(data[at : at + size].translate(None, NO_END))
                    elif size > SHORT_MESSAGE and at + size <= end and data[at + size - 1] < 128:
                        found = key_at if data[key_at] == key else None
                    has_prompt = has_prompt or field.full_name in PROMPTS
                if inner is not None and not inner.GetOptions().map_entry:
                    parts.append((at, min(at + size, end), inner))
                at += size
            else:
                at += _FIXED.get(kind, 0)
            if count > MAX_FIELDS:
                raise InvalidRequest(
                    f"a message must have at most {MAX_FIELDS} fields, got more in {len(data)} bytes; split "
                    "it, or send token ids as one packed field"
                )
    return found


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    found = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
        shift += 7
    return 0, end
