"""Resources that a sequence holds while it runs, such as pages.

To add a resource, subclass ``Resource`` and pass an instance to ``Scheduler(resources=...)``.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable

from .types import Sequence


class Admission(enum.Enum):
    ADMITTED = enum.auto()
    NO_RESOURCE = enum.auto()  # a resource is short; sequences that do not need it may be admitted first
    NO_MEDIA = enum.auto()  # the sequence waits outside of the queue until ``Scheduler.retry``
    PAGE_COMING = enum.auto()  # the sequence waits for a page that this step computes; others may overtake it
    STOP = enum.auto()  # nothing is left for this sequence or for later ones


class Resource:
    """A limited resource, held by every running sequence from admission to its end or preemption.

    A parallel sample that replaces its parent takes over the parent's resources.
    """

    @property
    def is_pending(self) -> bool:
        """Whether waiting sequences may get the resource even if no step is computed."""
        return False

    def may_admit(self, sequence: Sequence | None = None) -> bool:  # noqa: ARG002
        """Return whether ``hold`` might admit a sequence (None: any); changes nothing."""
        return True

    def hold(self, sequence: Sequence) -> Admission:  # noqa: ARG002
        """Reserve what a waiting sequence needs; reserve nothing unless the answer is ``ADMITTED``."""
        return Admission.ADMITTED

    def fork(self, sequence: Sequence, sample: Sequence) -> bool:  # noqa: ARG002
        """Reserve what a parallel sample of ``sequence`` needs; return False if it must wait."""
        return True

    def num_ready(self, sequence: Sequence) -> int:  # noqa: ARG002
        return sys.maxsize

    def release(self, sequence: Sequence) -> None: ...


class Resources(Resource):
    """Several resources that act as one: a sequence holds all of them or none."""

    def __init__(self, resources: Iterable[Resource]) -> None:
        self._resources = tuple(resources)

    @property
    def is_pending(self) -> bool:
        return any(resource.is_pending for resource in self._resources)

    def may_admit(self, sequence: Sequence | None = None) -> bool:
        return all(resource.may_admit(sequence) for resource in self._resources)

    def hold(self, sequence: Sequence) -> Admission:
        """Hold each resource in order; return the answer of the first that does not admit the sequence."""
        for index, resource in enumerate(self._resources):
            if (answer := resource.hold(sequence)) is not Admission.ADMITTED:
                self._release(sequence, index)
                return answer
        return Admission.ADMITTED

    def fork(self, sequence: Sequence, sample: Sequence) -> bool:
        for index, resource in enumerate(self._resources):
            if not resource.fork(sequence, sample):
                self._release(sample, index)
                return False
        return True

    def num_ready(self, sequence: Sequence) -> int:
        return min(resource.num_ready(sequence) for resource in self._resources)

    def release(self, sequence: Sequence) -> None:
        self._release(sequence, len(self._resources))

    def _release(self, sequence: Sequence, count: int) -> None:
        for resource in reversed(self._resources[:count]):
            resource.release(sequence)
