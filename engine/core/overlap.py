"""Overlap of steps: the rules for submitting a step before the previous one is resolved.

The next step is submitted while another is in flight if it computes only one token per sequence, and if
sampling needs nothing that is still unknown. In these cases, the step in flight is resolved first:

because of ``may_overlap`` below
    - output under a schema or grammar, because the last token decides which tokens are allowed next
    - repetition, frequency and presence penalties, because they count the last token
    - drafts (``speculate``) after the last token, because the accepted drafts decide the next
      row. A sample without drafts does not make the step wait, but one with a draft model always does
    - rows of prompts that are scored or embedded
because of ``Scheduler.plan_ahead``
    - a prompt or a prompt chunk in the step, samples that fork (n > 1), drafts
    - a waiting sequence that might be admitted, lack of pages (and so preemption), copies of pages
    - pages that are stored on disk, states of recurrent layers
because of the runner (``Pending.feeds``)
    - tokens that the next step cannot read on the device
because of the engine's thread (``EngineCore.settle``)
    - commands, which may read or write pages or change their holders
"""

from __future__ import annotations

from collections.abc import Sequence

from .request import Sample
from .step_parts import StepParts


def may_overlap(parts: StepParts, going_on: Sequence[Sample]) -> bool:
    """Whether the next step may be submitted. The caller checks that the step in flight can feed the next one
    and has no results for parts. ``going_on``: samples that get a token from the step in flight."""
    return all(part.may_overlap(going_on) for part in parts.live) and all(
        sample.state.is_foreseen for sample in going_on
    )
