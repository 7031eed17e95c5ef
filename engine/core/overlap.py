"""Rules for submitting a step before the previous step is resolved.

Steps overlap if every sequence computes one token and sampling needs nothing that is still unknown.
Otherwise the step in flight is resolved first, because of:

- grammars, penalties, drafts, sequences that wait for images, and prompts with log-probabilities or
  embeddings (``may_overlap``)
- prompt chunks, samples that fork, waiting sequences, preemption, disk stores and recurrent states
  (``Scheduler.plan_ahead``)
- tokens that the next step cannot read on the device (``Pending.feeds``)
- commands, which may read or write pages (``EngineCore.settle``)
"""

from __future__ import annotations

from collections.abc import Sequence

from .request import Sample
from .step_parts import StepParts


def may_overlap(parts: StepParts, going_on: Sequence[Sample]) -> bool:
    """Whether the next step may be submitted while these samples await a token."""
    return all(part.may_overlap(going_on) for part in parts.live) and all(
        sample.state.is_foreseen for sample in going_on
    )
