"""Prompt lookup: drafts of tokens that followed the latest tokens earlier in the prompt or output.

(Saxena, Prompt Lookup Decoding, 2023; vLLM's "ngram".) It helps if the output repeats the input: edits of
code or text, quotations, forms.
"""

from __future__ import annotations

from collections.abc import Sequence

from .drafter import Proposal
from .ngram_index import NGRAM, TextIndex

MAX_PLACES = 8  # latest places to compare
MAX_MATCH = 32  # tokens before the end to compare


class NgramDrafter:
    """A ``Drafter`` that follows the latest place with the longest match to the last tokens."""

    def __init__(self, index: TextIndex | None = None) -> None:
        self._index = index or TextIndex()

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        self._index.extend(tokens)
        last = len(tokens) - 1
        best, longest = -1, NGRAM - 1
        for end in self._index.places(tokens, MAX_PLACES):
            # A longer match must match at this token, too, so it is checked first.
            if end < longest or tokens[end - longest] != tokens[last - longest]:
                continue
            length = common(tokens, end, tokens, last)
            if length > longest:
                best, longest = end, length
                if length == MAX_MATCH:
                    break
        if best < 0:
            return Proposal()
        drafts = [*tokens[best + 1 : best + 1 + most]]
        while len(drafts) < most:  # at the end, the repetition continues
            drafts.append(drafts[best - last])
        return Proposal(drafts, longest)


def common(text: Sequence[int], end: int, tokens: Sequence[int], last: int) -> int:
    """Return how many tokens of ``text`` before ``end`` equal those of ``tokens`` before ``last``, at most
    MAX_MATCH."""
    most = min(end + 1, last + 1, MAX_MATCH)
    length = 0
    while length < most and text[end - length] == tokens[last - length]:
        length += 1
    return length
