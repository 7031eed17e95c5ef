"""Messages of a given size with as many elements as possible, for each field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED = {
    FieldDescriptor.TYPE_DOUBLE: FIXED64,
    FieldDescriptor.TYPE_FIXED64: FIXED64,
    FieldDescriptor.TYPE_SFIXED64: FIXED64,
    FieldDescriptor.TYPE_FLOAT: FIXED32,
    FieldDescriptor.TYPE_FIXED32: FIXED32,
    FieldDescriptor.TYPE_SFIXED32: FIXED32,
}
MAX_DEPTH = 3


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | BYTES) + varint(len(content)) + content


def hostile(described: Descriptor, size: int, depth: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of about ``size`` bytes: each field at its longest, and as often as possible."""
    if depth == 0:
        yield "unknown fields", (varint(9999 << 3) + b"\x01") * (size // 4)
    for each in described.fields:
        for name, content in _of_field(each, size, depth):
            yield f"{each.name}{name}", content


def _of_field(each: FieldDescriptor, size: int, depth: int) -> Iterator[tuple[str, bytes]]:
    number = each.number
    inner: Any = each.message_type
    if inner is not None:
        empty = field(number, b"")
        yield " many empty", empty * (size // len(empty))
        small = field(number, b"".join(map(_small, inner.fields)))
        yield " many small", small * (size // len(small))
        if inner.GetOptions().map_entry:
            keys = (_key(inner.fields[0], at) for at in range(size // 12))
            yield " many keys", b"".join(field(number, key + _small(inner.fields[1])) for key in keys)
        elif depth < MAX_DEPTH:
            for name, content in hostile(inner, size, depth + 1):
                yield f".{name}", field(number, content)
        return
    if each.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        yield " long", field(number, b"a" * size)
        yield " of zeros", field(number, b"\0" * size)
        yield " many", _small(each) * (size // len(_small(each)))
        return
    if each.is_repeated:
        width = 2 if each.type not in _FIXED else 4 if _FIXED[each.type] == FIXED32 else 8
        yield " packed", field(number, (b"\x85\x02" + bytes(width - 2)) * (size // width))
        yield " many", _small(each) * (size // len(_small(each)))


def _small(each: FieldDescriptor) -> bytes:
    if each.message_type is not None:
        return field(each.number, b"")
    if each.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return field(each.number, b"a")
    kind = _FIXED.get(each.type, VARINT)
    return varint(each.number << 3 | kind) + {VARINT: b"\x01", FIXED32: bytes(4), FIXED64: bytes(8)}[kind]


def _key(each: FieldDescriptor, at: int) -> bytes:
    if each.type == FieldDescriptor.TYPE_STRING:
        return field(each.number, str(at).encode())
    return varint(each.number << 3 | VARINT) + varint(at)
