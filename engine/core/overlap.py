"""What may be in flight together: the one place that says which steps wait for the one before.

While a step is in flight the next one is submitted, if it is only the next token of everybody in it, and
everything else about that token is known already. Otherwise the step in flight is resolved first:

by the rule below
    - output held to a schema or grammar: what may come next depends on the token
    - repetition, frequency and presence penalties: they count the token
    - drafts (``speculate``), where something was guessed at the last token, computed or not: how many hold
      decides where the next row lies. So a sample for which nothing is guessed loses nothing, and begins
      to draft a token later. What a model guesses is always waited for
    - rows of prompts that are scored or embedded
by ``Scheduler.plan_ahead``
    - a prompt or part of one in the step, samples that fork (n > 1), drafts
    - somebody who waits and might be let in, page shortage (and so preemption), copies of pages
    - pages that are kept on disk, states of recurrent layers
by the runner (``Pending.feeds``)
    - tokens that are not where the next step could take them from
by the engine's thread (``EngineCore.settle``)
    - commands, which may read pages, write them or change who holds them
"""

from __future__ import annotations

from collections.abc import Sequence

from .request import Sample
from .step_parts import StepParts


def may_overlap(parts: StepParts, going_on: Sequence[Sample]) -> bool:
    """Whether the step after the one in flight, which can feed it and has no results for any part, may be
    submitted already. ``going_on``: samples that get a token from the step in flight."""
    return all(part.may_overlap(going_on) for part in parts.live) and all(
        sample.state.is_foreseen for sample in going_on
    )
