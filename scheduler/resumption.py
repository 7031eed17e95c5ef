"""Sequences that gave their pages back and get them from the connector, instead of computing them again."""

from __future__ import annotations

from .connector import KVConnector
from .prompt_pace import PromptPace
from .resources import Admission, Resource
from .sequence_queues import SequenceQueues
from .types import Sequence


class Resumption(Resource):
    """Whose pages a connector keeps while they wait, and who is on the way back.

    A sequence that gives way says so to the connector before its pages are gone. When there is room for
    it again, the connector may bring in what the pool has lost meanwhile, if it is quicker than
    computing, once each time. Until then the room is its own: nobody of its priority is let in.
    """

    def __init__(self, connector: KVConnector, queues: SequenceQueues, pace: PromptPace) -> None:
        self._connector = connector
        self._queues = queues
        self._pace = pace
        self._loading: set[Sequence] = set()

    def gives_way(self, sequence: Sequence) -> None:
        """It runs, and will not any more."""
        if not sequence.skip_prefix_cache:
            self._connector.keep(sequence, self._pace.token_s)
            sequence.history.may_load = True

    def hold(self, sequence: Sequence) -> Admission:
        """Admit a sequence for which there is room, unless it gets its saved pages first."""
        if not sequence.history.may_load:
            return Admission.ADMITTED
        sequence.history.may_load = False
        if not self._connector.start_load(sequence, token_s=self._pace.token_s):
            return Admission.ADMITTED
        self._queues.load(sequence)
        self._loading.add(sequence)
        return Admission.STOP  # the room is for this one, when its pages are there

    def end(self, sequence: Sequence) -> bool:
        """It waits for pages no more: back to its place, if it was on its way back."""
        if sequence not in self._loading:
            return False
        self._loading.remove(sequence)
        self._queues.resume(sequence)
        return True

    def holds_up(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence has to leave the room to one whose pages are on the way back.

        A tenant below its share of the slots does not wait for one that has its share."""
        return any(
            each.priority <= sequence.priority and not self._precedes(sequence.tenant, each.tenant)
            for each in self._loading
        )

    def _precedes(self, tenant: str, other: str) -> bool:
        shares = self._queues.shares
        return tenant != other and shares.is_below(tenant) and not shares.is_below(other)

    def holds_up_all(self) -> bool:
        """The same of everybody who waits."""
        first = next(self._queues.waiting.offers(), None) if self._loading else None
        return first is not None and self.holds_up(first)


class RoomOfLoads(Resource):
    """Room of preempted sequences whose saved pages are being loaded: others leave it to them."""

    def __init__(self, resumption: Resumption) -> None:
        self._resumption = resumption

    def hold(self, sequence: Sequence) -> Admission:
        return Admission.STOP if self._resumption.holds_up(sequence) else Admission.ADMITTED
