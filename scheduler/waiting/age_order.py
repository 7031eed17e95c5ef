"""The order of waiting sequences in one lane (see queue.py), in which no sequence waits forever."""

from __future__ import annotations

from collections.abc import Iterable, Set

from octavo.block_manager import BlockManager

from ..types import Sequence

LOOKUPS = 16  # sequences looked up per step
HASHED_TOKENS = 8192  # tokens of new prompts hashed per step; at least one prompt is hashed


class CachedLengths:
    """Estimates of cached tokens, because looking up all prompts in every step would cost too much.

    Each step refreshes some of them, new ones first, then the others in turn. An eviction since then only
    affects the order; it is noticed at admission.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._known: dict[Sequence, int] = {}  # least recently refreshed first

    def of(self, sequence: Sequence) -> int:
        """Return the estimated cached tokens of a sequence; 0 if it was not looked up yet."""
        return self._known.get(sequence, 0)

    def forget(self, sequence: Sequence) -> None:
        self._known.pop(sequence, None)

    def refresh(self, waiting: Iterable[Sequence]) -> None:
        """Look up some of these sequences; drop those that no longer wait."""
        new = [sequence for sequence in waiting if sequence not in self._known][:LOOKUPS]
        stale = list(self._known)[: LOOKUPS - len(new)]
        may_hash = HASHED_TOKENS
        for sequence in (*new, *stale):
            missing = len(sequence.tokens) - len(sequence.digests) * self._blocks.page_size
            if missing > self._blocks.page_size:
                if may_hash <= 0:
                    continue
                may_hash -= missing
            self._known.pop(sequence, None)
            self._known[sequence] = cached_tokens(sequence, self._blocks)


def cached_tokens(sequence: Sequence, blocks: BlockManager) -> int:
    """Return how many tokens of a waiting sequence the prefix cache has now."""
    if sequence.skip_prefix_cache or not blocks.prefix_cache:
        return 0
    digests = blocks.name_pages(sequence.tokens, sequence.digests, salt=sequence.salt, media=sequence.media)
    return blocks.num_findable(digests) * blocks.page_size


MAX_OVERTAKEN = 32
"""Number of younger sequences admitted before the oldest one, or before preempted ones, until these come
first. The last admission may overtake by as many more sequences as run at once."""

MAX_PASSED = 256
"""Number of younger sequences admitted before the oldest one while it comes first but cannot be admitted, for
example because a long prompt is being computed. After that no sequence passes it, because otherwise the
memory it needs might never become free. docs/design/latency-bounds.md and preemption-bounds.md derive bounds
from both."""


class AgeOrder:
    """Order of waiting sequences by age.

    Preempted sequences come first, then the oldest one if it has been overtaken ``MAX_OVERTAKEN`` times, then
    the others, and last those that are late, so that others can still be on time. With a prefix cache,
    sequences of the same rank are ordered by cached tokens, most first.

    lengths   estimated cached tokens; None: they do not matter
    late      sequences that never ran and can no longer meet the target of their first token
    """

    def __init__(self, blocks: BlockManager | None = None) -> None:
        """Begin without sequences. ``blocks``: prefix cache that affects the order, if any."""
        self.lengths = None if blocks is None else CachedLengths(blocks)
        self.late: Set[Sequence] = frozenset()
        self._interrupted: set[Sequence] = set()

    def rank(self, equals: Iterable[Sequence]) -> list[tuple[int, int, Sequence]]:
        """Return each of these sequences of one lane with its rank.

        Smaller ranks come first, ties in the given order: preempted sequences by age, then the others by age.
        """
        equals = list(equals)
        _, oldest = self._first_ones(equals)
        due = oldest if oldest is not None and oldest.history.num_overtaken >= MAX_OVERTAKEN else None
        return [self._rank(each, due) for each in equals]

    def in_order(self, equals: Iterable[Sequence]) -> list[Sequence]:
        """Return these sequences of one lane, by rank."""
        return [each for _, _, each in sorted(self.rank(equals), key=lambda rank: rank[:2])]

    def interrupt(self, sequence: Sequence) -> None:
        """Note that a running sequence waits again."""
        self._interrupted.add(sequence)

    def num_before(self, sequence: Sequence, equals: Iterable[Sequence]) -> int:
        """Return how many of ``equals`` come before a preempted sequence.

        These are preempted, too, and were first admitted before it.
        """
        ran, _ = self._first_ones(equals)
        return sum(each.history.num_admitted_before < sequence.history.num_admitted_before for each in ran)

    def may_pass(self, sequence: Sequence, equals: Iterable[Sequence]) -> bool:
        """Whether one of ``equals`` may be admitted before an earlier one that has to wait."""
        ran, oldest = self._first_ones(equals)
        if ran and _times_overtaken(ran) >= MAX_OVERTAKEN:
            return False
        return oldest is None or oldest is sequence or oldest.history.num_overtaken < MAX_PASSED

    def leaves(self, sequence: Sequence, equals: Iterable[Sequence]) -> None:
        """Note that one of ``equals`` no longer waits."""
        if self.lengths is not None:
            self.lengths.forget(sequence)
        ran, oldest = self._first_ones(equals)
        if sequence in self._interrupted:
            self._interrupted.remove(sequence)
            others = [each for each in ran if each is not sequence]
            if others:  # all of them are overtaken
                others[0].history.num_overtaken = max(
                    others[0].history.num_overtaken, sequence.history.num_overtaken
                )
            return
        if ran:
            ran[0].history.num_overtaken = 1 + _times_overtaken(ran)
        if oldest is not None and oldest is not sequence:
            oldest.history.num_overtaken += 1

    def replace(self, sequence: Sequence, successor: Sequence) -> None:
        """Let ``successor`` take the place and age of a waiting sequence."""
        if self.lengths is not None:
            self.lengths.forget(sequence)
        if sequence in self._interrupted:
            self._interrupted.remove(sequence)
            self._interrupted.add(successor)

    def _rank(self, sequence: Sequence, due: Sequence | None) -> tuple[int, int, Sequence]:
        if sequence in self._interrupted:
            return 0, 0, sequence
        if sequence is due:
            return 1, 0, sequence
        return 3 if sequence in self.late else 2, self._preference(sequence), sequence

    def _preference(self, sequence: Sequence) -> int:
        """Return the preference among sequences that never ran; smaller ones come first."""
        return 0 if self.lengths is None else -self.lengths.of(sequence)

    def _first_ones(self, equals: Iterable[Sequence]) -> tuple[list[Sequence], Sequence | None]:
        """Return the preempted sequences, which lead ``equals``, and the oldest one that never ran."""
        ran: list[Sequence] = []
        for each in equals:
            if each not in self._interrupted:
                return ran, each
            ran.append(each)
        return ran, None


def _times_overtaken(ran: Iterable[Sequence]) -> int:
    """Return how often sequences that never ran have overtaken these preempted ones while they waited."""
    return max(each.history.num_overtaken for each in ran)
