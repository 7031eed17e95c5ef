"""Token ids of a prompt, kept as packed bytes until the request is admitted."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from google.protobuf.unknown_fields import UnknownFieldSet

from ..api.errors import InvalidRequest

CARRIER = 15
NO_END = bytes(range(128, 256))
_PIECE = 2**16
_MAX_VARINT = 10


def ids_of(owner: Any, ids: Sequence[int]) -> Sequence[int]:
    unknown = UnknownFieldSet(owner)
    fields = [unknown[at] for at in range(len(unknown))]
    packed = [field.data for field in fields if (field.field_number, field.wire_type) == (CARRIER, 2)]
    if not packed:
        return ids
    if len(packed) > 1 or ids:
        raise InvalidRequest("token ids must be one packed list, got several lists; join them")
    return PackedIds(packed[0])


class PackedIds(Sequence[int]):
    """Sequence of 32-bit integers in protobuf's packed encoding."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __len__(self) -> int:
        return self._length

    @functools.cached_property
    def _length(self) -> int:
        return len(self._data.translate(None, NO_END))

    def __iter__(self) -> Iterator[int]:
        data, begin = self._data, 0
        while begin < len(data):
            end = min(begin + _PIECE, len(data))
            while data[end - 1] > 127 and end < min(len(data), begin + _PIECE + _MAX_VARINT):
                end += 1
            yield from _decoded(np.frombuffer(data, np.uint8, end - begin, begin))
            begin = end

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return next(iter(self)) if index == 0 else list(self)[index]


def _decoded(data: np.ndarray[Any, np.dtype[np.uint8]]) -> list[int]:
    ends = np.flatnonzero(data < 128)
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts[: len(ends)] + 1
    if not len(ends) or ends[-1] != len(data) - 1 or (longest := int(lengths.max())) > _MAX_VARINT:
        raise InvalidRequest("the message cannot be parsed: its token ids are not packed numbers")
    found = np.zeros(len(ends), np.uint64)
    for at in range(longest):
        has = lengths > at
        found[has] |= (data[starts[has] + at] & np.uint8(127)).astype(np.uint64) << np.uint64(7 * at)
    numbers: list[int] = (found & np.uint64(2**32 - 1)).tolist()
    return numbers
