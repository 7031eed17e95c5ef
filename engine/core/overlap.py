"""Rules for submitting a step before the results of the previous step are known.

Every sequence must compute one token, and sampling must need nothing that is still unknown. Otherwise the
previous step is finished first. The rules are in ``may_overlap``, ``Scheduler.plan_ahead``,
``Pending.feeds`` and ``EngineCore.settle``.
"""

from __future__ import annotations

from collections.abc import Sequence

from .request import Sample
from .step_parts import StepParts


def may_overlap(parts: StepParts, unfinished: Sequence[Sample]) -> bool:
    """Whether the next step may be submitted while these samples await a token."""
    return all(part.may_overlap(unfinished) for part in parts.live) and all(
        sample.state.is_foreseen for sample in unfinished
    )
