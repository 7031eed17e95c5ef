from __future__ import annotations

from collections.abc import Iterable, Set

from octavo.block_manager import BlockManager

from ..types import Sequence

LOOKUPS = 16  # sequences per step whose cached tokens are looked up
HASHED_TOKENS = 8192  # tokens of new prompts hashed per step; one prompt is always hashed


class CachedLengths:
    """Estimates of how many tokens of each waiting prompt are cached.

    Each step looks up only some prompts: new prompts first, then the others in turn.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._known: dict[Sequence, int] = {}

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
    """Return how many tokens of a waiting sequence are in the prefix cache now."""
    if sequence.skip_prefix_cache or not blocks.prefix_cache:
        return 0
    digests = blocks.page_digests(sequence.tokens, sequence.digests, salt=sequence.salt, media=sequence.media)
    return blocks.num_findable(digests) * blocks.page_size


MAX_OVERTAKEN = 32
"""After this many younger sequences were admitted before the oldest sequence, or before preempted ones, the
overtaken sequences come first. A single step may exceed this by as many sequences as run at once."""

HARD_MAX_OVERTAKEN = 256
"""The oldest sequence may come first and still not be admitted, for example because a long prompt is being
computed. After this many younger sequences were admitted before it, no sequence may pass it. Otherwise the
memory that it needs might never become free. docs/design/latency-bounds.md and preemption-bounds.md derive
bounds from MAX_OVERTAKEN and HARD_MAX_OVERTAKEN."""


class AgeOrder:
    """Order of waiting sequences by age.

    Preempted sequences come first. Next is the oldest sequence if it has been overtaken ``MAX_OVERTAKEN``
    times. Then come the others. Sequences that will miss their deadline come last. With a prefix cache,
    sequences of equal rank are ordered by cached tokens, most first.
    """

    def __init__(self, blocks: BlockManager | None = None) -> None:
        self.lengths = None if blocks is None else CachedLengths(blocks)
        self.late: Set[Sequence] = frozenset()
        self._preempted: set[Sequence] = set()

    def rank(self, peers: Iterable[Sequence]) -> list[tuple[int, int, Sequence]]:
        peers = list(peers)
        _, oldest = self._oldest(peers)
        due = oldest if oldest is not None and oldest.history.num_overtaken >= MAX_OVERTAKEN else None
        return [self._rank(each, due) for each in peers]

    def in_order(self, peers: Iterable[Sequence]) -> list[Sequence]:
        return [each for _, _, each in sorted(self.rank(peers), key=lambda rank: rank[:2])]

    def mark_preempted(self, sequence: Sequence) -> None:
        self._preempted.add(sequence)

    def num_before(self, sequence: Sequence, peers: Iterable[Sequence]) -> int:
        ran, _ = self._oldest(peers)
        return sum(each.history.num_admitted_before < sequence.history.num_admitted_before for each in ran)

    def may_overtake(self, sequence: Sequence, peers: Iterable[Sequence]) -> bool:
        """Return whether ``sequence`` may be admitted before an earlier one that must wait."""
        ran, oldest = self._oldest(peers)
        if ran and _times_overtaken(ran) >= MAX_OVERTAKEN:
            return False
        return oldest is None or oldest is sequence or oldest.history.num_overtaken < HARD_MAX_OVERTAKEN

    def remove(self, sequence: Sequence, peers: Iterable[Sequence]) -> None:
        if self.lengths is not None:
            self.lengths.forget(sequence)
        ran, oldest = self._oldest(peers)
        if sequence in self._preempted:
            self._preempted.remove(sequence)
            others = [each for each in ran if each is not sequence]
            if others:
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
        if sequence in self._preempted:
            self._preempted.remove(sequence)
            self._preempted.add(successor)

    def _rank(self, sequence: Sequence, due: Sequence | None) -> tuple[int, int, Sequence]:
        if sequence in self._preempted:
            return 0, 0, sequence
        if sequence is due:
            return 1, 0, sequence
        return 3 if sequence in self.late else 2, self._preference(sequence), sequence

    def _preference(self, sequence: Sequence) -> int:
        return 0 if self.lengths is None else -self.lengths.of(sequence)

    def _oldest(self, peers: Iterable[Sequence]) -> tuple[list[Sequence], Sequence | None]:
        ran: list[Sequence] = []
        for each in peers:
            if each not in self._preempted:
                return ran, each
            ran.append(each)
        return ran, None


def _times_overtaken(ran: Iterable[Sequence]) -> int:
    return max(each.history.num_overtaken for each in ran)
