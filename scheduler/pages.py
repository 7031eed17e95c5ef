from __future__ import annotations

from octavo.block_manager import BlockManager, Digest, Miss, PageTable

from .preemption import has_headroom
from .resources import Admission, Resource
from .sequence_queues import SequenceQueues
from .types import Lookup, ScheduledChunk, Sequence


class Pages(Resource):
    """Gives each running sequence its page table (``Sequence.table``).

    An admitted sequence has pages for all of its prompt. A *refused* sequence found too few idle pages; it is
    tried again only when more pages are idle.
    """

    def __init__(self, blocks: BlockManager, queues: SequenceQueues) -> None:
        self.is_short = False
        self._blocks = blocks
        self._queues = queues
        self._refused: tuple[Sequence, tuple[int, ...]] | None = None
        self._being_written: set[Digest] = set()
        self._miss: Miss | None = None

    @property
    def refused(self) -> Sequence | None:
        if self._refused is None:
            return None
        sequence, before = self._refused
        more = any(now > then for now, then in zip(self._blocks.idle_pages(), before, strict=True))
        return None if more else sequence

    def clear_refused(self) -> None:
        self._refused = None

    def begin_step(self, work: list[ScheduledChunk]) -> None:
        """Record the prompt pages that running sequences write in this step."""
        self._being_written.clear()
        for item in work:
            self.on_planned(item)

    def on_planned(self, item: ScheduledChunk) -> None:
        sequence, start, stop, samples, *_ = item
        if stop - start > 1 or not samples:
            assert sequence.table is not None
            page_size = self._blocks.page_size
            self._being_written.update(sequence.table.digests[start // page_size : -(-stop // page_size)])

    def may_admit(self, sequence: Sequence | None = None) -> bool:
        return sequence is None or sequence is not self.refused

    def hold(self, sequence: Sequence) -> Admission:
        if not self.may_admit(sequence):
            return Admission.STOP
        blocks, find = self._blocks, not sequence.skip_prefix_cache
        table = blocks.open(
            sequence.tokens,
            salt=sequence.salt,
            digests=sequence.digests,
            find=find,
            media=sequence.media,
        )
        if find and _next_digest(table) in self._being_written:
            blocks.close(table)
            return Admission.PAGE_COMING
        if sequence.history.num_cached is None:
            self._miss = blocks.explain_miss(table, sequence.tokens) if find else Miss(0, "disabled")
        sequence.table = table
        first = table.num_written + 1
        if has_headroom(sequence, self._queues.running, blocks) and blocks.reserve(
            table, first, ahead=len(sequence.tokens)
        ):
            self._refused = None
            return Admission.ADMITTED
        self.release(sequence)
        self._refused = (sequence, blocks.idle_pages())
        self.is_short = True
        self._queues.shares.limit(max(1, len(self._queues.running)))
        return Admission.STOP

    def fork(self, sequence: Sequence, sample: Sequence) -> bool:
        assert sequence.table is not None
        if (table := self._blocks.fork(sequence.table)) is None:
            return False
        sample.table, sample.history.digests = table, table.digests
        return True

    def release(self, sequence: Sequence) -> None:
        table, sequence.table = sequence.table, None
        assert table is not None, f"{sequence.sequence_id} holds no pages"
        self._blocks.close(table)

    def lookup(self, sequence: Sequence) -> Lookup | None:
        """Return the prefix-cache result of a sequence that was just admitted; None if it ran before."""
        if sequence.history.num_cached is not None:
            return None
        assert self._miss is not None
        sequence.history.num_cached = sequence.num_written
        num_tokens = len(sequence.tokens)
        misses = self._blocks.miss_reasons.count(num_tokens, self._miss)
        return Lookup(sequence, num_tokens, sequence.history.num_cached, misses, self._miss)


def _next_digest(table: PageTable) -> Digest | None:
    index = len(table.pages)
    return table.digests[index] if index < len(table.digests) else None
