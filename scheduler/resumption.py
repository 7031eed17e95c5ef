"""Preempted sequences whose pages a connector loads, instead of recomputing them."""

from __future__ import annotations

from .connector import KVConnector
from .prompt_pace import PromptPace
from .resources import Admission, Resource
from .sequence_queues import SequenceQueues
from .types import Sequence


class Resumption(Resource):
    """Lets a connector store the pages of preempted sequences and load them again.

    The connector copies a sequence's pages before the sequence is preempted. When pages are free again, the
    connector may load those that the pool has evicted, once per preemption, if loading is faster than
    computing. Until they are loaded, no sequence of the same or lower priority is admitted.
    """

    def __init__(self, connector: KVConnector, queues: SequenceQueues, pace: PromptPace) -> None:
        self._connector = connector
        self._queues = queues
        self._pace = pace
        self._loading: set[Sequence] = set()

    def gives_way(self, sequence: Sequence) -> None:
        """Let the connector store the pages of a running sequence that is about to be preempted."""
        if not sequence.skip_prefix_cache:
            self._connector.keep(sequence, self._pace.token_s)
            sequence.history.may_load = True

    def hold(self, sequence: Sequence) -> Admission:
        """Admit a sequence for which pages are free; if it has stored pages, begin to load those instead."""
        if not sequence.history.may_load:
            return Admission.ADMITTED
        sequence.history.may_load = False
        if not self._connector.start_load(sequence, token_s=self._pace.token_s):
            return Admission.ADMITTED
        self._queues.load(sequence)
        self._loading.add(sequence)
        return Admission.STOP  # the free pages are reserved until this one's pages are loaded

    def end(self, sequence: Sequence) -> bool:
        """Queue a preempted sequence whose pages were being loaded; False if it is not such a sequence."""
        if sequence not in self._loading:
            return False
        self._loading.remove(sequence)
        self._queues.resume(sequence)
        return True

    def holds_up(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence must leave free pages to a sequence whose pages are being loaded.

        A tenant below its share of slots does not wait for a tenant that has its share.
        """
        return any(
            each.priority <= sequence.priority and not self._precedes(sequence.tenant, each.tenant)
            for each in self._loading
        )

    def _precedes(self, tenant: str, other: str) -> bool:
        shares = self._queues.shares
        return tenant != other and shares.is_below(tenant) and not shares.is_below(other)

    def holds_up_all(self) -> bool:
        """Whether no waiting sequence may be admitted, because pages of another are being loaded."""
        first = next(self._queues.waiting.offers(), None) if self._loading else None
        return first is not None and self.holds_up(first)


class RoomOfLoads(Resource):
    """Resource that keeps free pages for preempted sequences whose stored pages are being loaded."""

    def __init__(self, resumption: Resumption) -> None:
        self._resumption = resumption

    def hold(self, sequence: Sequence) -> Admission:
        return Admission.STOP if self._resumption.holds_up(sequence) else Admission.ADMITTED
