"""Drafts from text: the tokens that followed earlier occurrences of the last tokens.

``NgramDrafter`` is prompt lookup (Saxena, Prompt Lookup Decoding, 2023; vLLM's "ngram").
``SuffixDrafter`` is suffix decoding (Oliaro et al., SuffixDecoding, 2024) with hash chains of n-grams
instead of suffix trees.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from .drafter import Proposal
from .ngram_index import NGRAM, TextIndex
from .recent_outputs import BETWEEN, RecentOutputs

MAX_SEARCHED = 8  # earlier positions that are compared
MAX_MATCH = 32  # tokens of the longest match


class NgramDrafter:
    """Drafts the continuation of the longest earlier match."""

    def __init__(self, index: TextIndex | None = None) -> None:
        self._index = index or TextIndex()

    def propose(self, tokens: Sequence[int], max_drafts: int) -> Proposal:
        self._index.extend(tokens)
        last = len(tokens) - 1
        best, longest = -1, NGRAM - 1
        for end in self._index.places(tokens, MAX_SEARCHED):
            if end < longest or tokens[end - longest] != tokens[last - longest]:
                continue
            length = common(tokens, end, tokens, last)
            if length > longest:
                best, longest = end, length
                if length == MAX_MATCH:
                    break
        if best < 0:
            return Proposal()
        drafts = [*tokens[best + 1 : best + 1 + max_drafts]]
        while len(drafts) < max_drafts:
            drafts.append(drafts[best - last])
        return Proposal(drafts, longest)


def common(text: Sequence[int], end: int, tokens: Sequence[int], last: int) -> int:
    """Return the length of the match that ends at ``text[end]`` and ``tokens[last]``."""
    limit = min(end + 1, last + 1, MAX_MATCH)
    length = 0
    while length < limit and text[end - length] == tokens[last - length]:
        length += 1
    return length


MAX_PLACES = 4
TOKENS_PER_MATCH = 2  # drafts per token of the longest match
_MIN_SHARE = 0.3

_Place = tuple[int, int]  # (end position, length)


class SuffixDrafter:
    """Drafts the most common continuation of the longest earlier matches."""

    def __init__(self, index: TextIndex | None = None, recent: RecentOutputs | None = None) -> None:
        self._index = index or TextIndex()
        self._recent = recent or RecentOutputs()
        self._generation = self._recent.generation
        self._own: list[_Place] = []
        self._others: list[_Place] = []
        self._num_seen = 0

    def propose(self, tokens: Sequence[int], max_drafts: int) -> Proposal:
        recent, last = self._recent, len(tokens) - 1
        self._index.extend(tokens)
        if self._generation != recent.generation:
            self._generation, self._others = recent.generation, []
        new = tokens[self._num_seen :] if self._num_seen else ()
        self._num_seen = len(tokens)
        self._own = _followed(self._own, tokens, new)
        self._others = _followed(self._others, recent.tokens, new)
        if last + 1 >= NGRAM:
            if len(self._own) < 2:
                self._own = _found(self._own, tokens, self._index.places(tokens, MAX_PLACES), tokens, last)
            if len(self._others) < 2 and len(recent.tokens):
                ends = recent.places(tokens[-NGRAM:], MAX_PLACES)
                self._others = _found(self._others, recent.tokens, ends, tokens, last)
        return self._most_common(tokens, max_drafts)

    def _most_common(self, tokens: Sequence[int], max_drafts: int) -> Proposal:
        recent = self._recent.tokens
        last_of_recent = len(recent) - 1
        continued = [
            (end, length)
            for end, length in self._others
            if end < last_of_recent and recent[end + 1] != BETWEEN
        ]
        if not (self._own or continued):
            return Proposal()
        longest = max(length for _, length in (*self._own, *continued))
        least, max_drafts = longest / 2, min(max_drafts, TOKENS_PER_MATCH * longest)
        continuations = [
            _repeat_until(tokens, end + 1, max_drafts) for end, length in self._own if length >= least
        ]
        continuations += [
            _until_between(recent, end + 1, max_drafts) for end, length in continued if length >= least
        ]
        return Proposal(_majority(continuations), longest)


def _repeat_until(tokens: Sequence[int], at: int, count: int) -> list[int]:
    continuations, period = list(tokens[at : at + count]), len(tokens) - at
    while len(continuations) < count:
        continuations.append(continuations[-period])
    return continuations


def _until_between(recent: array[int], at: int, count: int) -> list[int]:
    continuations = recent[at : at + count].tolist()
    return continuations[: continuations.index(BETWEEN)] if BETWEEN in continuations else continuations


def _majority(continuations: list[list[int]]) -> list[int]:
    drafts: list[int] = []
    needed = _MIN_SHARE * len(continuations)
    while len(continuations) > 1:
        place = len(drafts)
        votes: dict[int, int] = {}
        for each in continuations:
            if place < len(each):
                token = each[place]
                votes[token] = votes.get(token, 0) + 1
        if not votes:
            return drafts
        best = max(votes, key=votes.__getitem__)
        if votes[best] < needed:
            return drafts
        drafts.append(best)
        if votes[best] < len(continuations):
            continuations = [each for each in continuations if place < len(each) and each[place] == best]
    return continuations[0] if needed <= 1 else drafts


def _followed(places: list[_Place], text: Sequence[int], new: Sequence[int]) -> list[_Place]:
    for token in new:
        if not places:
            break
        end_of_text = len(text) - 1
        places = [
            (end + 1, length + 1) for end, length in places if end < end_of_text and text[end + 1] == token
        ]
    return places


def _found(
    places: list[_Place], text: Sequence[int], ends: list[int], tokens: Sequence[int], last: int
) -> list[_Place]:
    known = dict(places)
    for end in ends:
        if end not in known and (length := common(text, end, tokens, last)) >= NGRAM:
            known[end] = length
            if length == MAX_MATCH:
                break
    return sorted(known.items(), key=lambda place: place[1], reverse=True)[:MAX_PLACES]
