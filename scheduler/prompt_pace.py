from __future__ import annotations

from collections.abc import Iterable, Set

from octavo.block_manager import BlockManager

from .types import SchedulerOutput, Sequence
from .waiting import cached_tokens

LOOKUPS = 16  # prompts per step whose cached tokens are looked up


class PromptPace:
    """Average seconds of prefill per prompt token; None before the first prompt."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0
        self.token_s: float | None = None

    def observe(self, step: SchedulerOutput, seconds: float) -> None:
        if step.decode_only:
            return
        tokens = sum(
            item.stop - item.start for item in step.work if item.stop - item.start > 1 or not item.samples
        )
        if tokens:
            self._seconds = 0.98 * self._seconds + seconds
            self._tokens = 0.98 * self._tokens + tokens
            self.token_s = self._seconds / self._tokens


class Deadlines:
    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._late: Set[Sequence] = frozenset()

    def late(self, waiting: Iterable[Sequence], now: float, token_s: float | None) -> Set[Sequence]:
        """Return those waiting sequences that never ran and can no longer meet their deadline."""
        late: set[Sequence] = set()
        lookups = LOOKUPS
        for sequence in waiting:
            if (
                deadline := sequence.latency.first_token_by
            ) is None or sequence.history.num_cached is not None:
                continue
            left = deadline - now
            if left <= 0 or sequence in self._late:
                late.add(sequence)
            elif token_s is not None and len(sequence.tokens) * token_s > left and lookups:
                lookups -= 1
                missing = len(sequence.tokens) - cached_tokens(sequence, self._blocks)
                if missing * token_s > left:
                    late.add(sequence)
        self._late = late
        return late
