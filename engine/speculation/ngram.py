"""Prompt lookup: what followed the last tokens when they stood in the prompt or the output before.

(Saxena, Prompt Lookup Decoding, 2023; vLLM's "ngram".) Good for outputs that repeat their input: edits of
code or text, quotations, forms.
"""

from __future__ import annotations

from collections.abc import Sequence

from .drafter import Proposal
from .ngram_index import NGRAM, TextIndex

MAX_PLACES = 8  # that are compared, the latest ones
MAX_MATCH = 32  # tokens before the end that are compared


class NgramDrafter:
    """A ``Drafter``: of the latest places where the last tokens stood, it takes the one with most in common
    before it, and of equal ones the latest."""

    def __init__(self, index: TextIndex | None = None) -> None:
        self._index = index or TextIndex()

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        self._index.extend(tokens)
        last = len(tokens) - 1
        best, longest = -1, NGRAM - 1
        for end in self._index.places(tokens, MAX_PLACES):
            # What has more in common has this token in common, too: that is looked at first.
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
        while len(drafts) < most:  # it runs into the end: what repeats goes on repeating
            drafts.append(drafts[best - last])
        return Proposal(drafts, longest)


def common(text: Sequence[int], end: int, tokens: Sequence[int], last: int) -> int:
    """How many tokens of ``text`` up to ``end`` are those of ``tokens`` up to ``last``; MAX_MATCH at most."""
    most = min(end + 1, last + 1, MAX_MATCH)
    length = 0
    while length < most and text[end - length] == tokens[last - length]:
        length += 1
    return length
