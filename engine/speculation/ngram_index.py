"""Index of n-grams in a text, for drafts from text.

A hash table has the positions of n-grams. Hashes may collide, so callers compare the matches. The index takes
at most 20 bytes per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

NGRAM = 3
"""Tokens per n-gram."""

_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_FOLD = 17
_MIN_SIZE = 256
_Ids = TypeVar("_Ids", int, NDArray[np.int64])
_BULK = 64  # number of tokens above which NumPy is faster


class NgramIndex:
    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._heads = array("i", [-1]) * _MIN_SIZE
        self._before = array("i")

    def __len__(self) -> int:
        return len(self._before)

    @property
    def num_bytes(self) -> int:
        return self._heads.itemsize * (len(self._heads) + len(self._before))

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the new tokens at the end of ``tokens``."""
        start, stop = self._start + len(self._before), len(tokens)
        if stop - self._start > len(self._heads):
            size = 1 << (2 * (stop - self._start) - 1).bit_length()
            self._heads, self._before, start = array("i", [-1]) * size, array("i"), self._start
        if stop - start >= _BULK:
            self._add_many(tokens, start, stop)
            return
        heads, before, mask = self._heads, self._before, len(self._heads) - 1
        for end in range(start, stop):
            if end < NGRAM - 1:
                before.append(-1)
                continue
            place = _place(tokens[end - 2], tokens[end - 1], tokens[end], mask)
            before.append(heads[place])
            heads[place] = end

    def places(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return candidate positions of the last n-gram, latest first."""
        last = len(tokens) - 1 - self._start
        return self._chain(self._before[last], limit) if len(tokens) >= NGRAM and last >= 0 else []

    def places_of(self, ngram: Sequence[int], limit: int) -> list[int]:
        """Return candidate positions of an n-gram, latest first."""
        a, b, c = ngram
        return self._chain(self._heads[_place(a, b, c, len(self._heads) - 1)], limit)

    def _chain(self, end: int, limit: int) -> list[int]:
        ends: list[int] = []
        start, before = self._start, self._before
        while end >= 0 and len(ends) < limit:
            ends.append(end)
            end = before[end - start]
        return ends

    def _add_many(self, tokens: Sequence[int], start: int, stop: int) -> None:
        first = max(start, NGRAM - 1)
        self._before.extend([-1] * (first - start))
        ids = np.array(tokens[first - NGRAM + 1 : stop], np.int64)
        places = _place(ids[:-2], ids[1:-1], ids[2:], len(self._heads) - 1)
        heads = np.frombuffer(self._heads, np.int32)
        order = np.argsort(places, kind="stable")
        ordered = places[order]
        links: NDArray[np.int32] = heads[ordered].copy()
        same = ordered[1:] == ordered[:-1]
        links[1:][same] = order[:-1][same] + first
        before = np.empty(len(order), np.int32)
        before[order] = links
        last = np.append(~same, True)
        heads[ordered[last]] = order[last] + first
        self._before.frombytes(before.tobytes())


class TextIndex:
    """Index of a prompt, which several samples may share, and of the output after it."""

    def __init__(self, prompt: NgramIndex | None = None, num_prompt: int = 0) -> None:
        self._prompt = NgramIndex() if prompt is None else prompt
        self._num_prompt = num_prompt
        self._output = NgramIndex(num_prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        if len(self._prompt) < self._num_prompt:
            self._prompt.extend(tokens[: self._num_prompt])
        self._output.extend(tokens)

    def places(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return candidate positions of the last n-gram, latest first."""
        ends = self._output.places(tokens, limit)
        if len(ends) < limit and NGRAM <= self._num_prompt < len(tokens):
            ends += self._prompt.places_of(tokens[-NGRAM:], limit - len(ends))
        return ends


def _place(a: _Ids, b: _Ids, c: _Ids, mask: int) -> _Ids:
    x = a * _FACTORS[0] ^ b * _FACTORS[1] ^ c * _FACTORS[2]
    return (x ^ x >> _FOLD) & mask
