"""Overlap of steps: the rules for submitting a step before the previous one is resolved.

The next step is submitted while one is in flight if it only computes one token per sequence, and sampling
them needs nothing that is still unknown. Otherwise the step in flight is resolved first, in these cases:

by the rule below
    - output under a schema or grammar, because the last token decides which ones are allowed
    - repetition, frequency and presence penalties, because they count the last token
    - drafts (``speculate``) after the last token, because the accepted ones decide the next row.
      A sample without drafts does not wait, and drafts a token later. A draft model always makes it wait
    - rows of prompts that are scored or embedded
by ``Scheduler.plan_ahead``
    - a prompt or a chunk of one in the step, samples that fork (n > 1), drafts
    - a waiting sequence that might be admitted, lack of pages (and so preemption), copies of pages
    - pages that are stored on disk, states of recurrent layers
by the runner (``Pending.feeds``)
    - tokens that the next step cannot read on the device
by the engine's thread (``EngineCore.settle``)
    - commands, which may read or write pages or change their holders
"""

from __future__ import annotations

from collections.abc import Sequence

from .request import Sample
from .step_parts import StepParts


def may_overlap(parts: StepParts, going_on: Sequence[Sample]) -> bool:
    """Whether the next step may be submitted, if the one in flight can feed it and has no results for parts.
    ``going_on``: samples that get a token from the step in flight."""
    return all(part.may_overlap(going_on) for part in parts.live) and all(
        sample.state.is_foreseen for sample in going_on
    )
