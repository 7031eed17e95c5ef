from __future__ import annotations

from .connector import KVConnector
from .prompt_pace import PromptPace
from .resources import Admission, Resource
from .sequence_queues import SequenceQueues
from .types import Sequence


class Resumption(Resource):
    """Lets a connector store the pages of preempted sequences and load them again.

    Pages are copied before the preemption and loaded once pages are free, if that is faster than computing.
    Meanwhile no sequence of equal or lower priority is admitted.
    """

    def __init__(self, connector: KVConnector, queues: SequenceQueues, pace: PromptPace) -> None:
        self._connector = connector
        self._queues = queues
        self._pace = pace
        self._loading: set[Sequence] = set()

    def on_preemption(self, sequence: Sequence) -> None:
        """Let the connector store the pages of a running sequence that is about to be preempted."""
        if not sequence.skip_prefix_cache:
            self._connector.offload(sequence, self._pace.token_s)
            sequence.history.may_load = True

    def hold(self, sequence: Sequence) -> Admission:
        """Admit a sequence, or first load its stored pages."""
        if not sequence.history.may_load:
            return Admission.ADMITTED
        sequence.history.may_load = False
        if not self._connector.start_load(sequence, token_s=self._pace.token_s):
            return Admission.ADMITTED
        self._queues.load(sequence)
        self._loading.add(sequence)
        return Admission.STOP  # the free pages are reserved for the sequence that is being loaded

    def end(self, sequence: Sequence) -> bool:
        """Queue a preempted sequence after its pages were loaded; return False for other sequences."""
        if sequence not in self._loading:
            return False
        self._loading.remove(sequence)
        self._queues.resume(sequence)
        return True

    def must_wait(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence must leave free pages to a sequence that is being loaded."""
        return any(
            each.priority <= sequence.priority and not self._precedes(sequence.tenant, each.tenant)
            for each in self._loading
        )

    def _precedes(self, tenant: str, other: str) -> bool:
        shares = self._queues.shares
        return tenant != other and shares.is_below(tenant) and not shares.is_below(other)

    def all_must_wait(self) -> bool:
        """Return whether no waiting sequence may be admitted, because another is being loaded."""
        first = next(self._queues.waiting.admission_order(), None) if self._loading else None
        return first is not None and self.must_wait(first)


class LoadReservation(Resource):
    def __init__(self, resumption: Resumption) -> None:
        self._resumption = resumption

    def hold(self, sequence: Sequence) -> Admission:
        return Admission.STOP if self._resumption.must_wait(sequence) else Admission.ADMITTED
