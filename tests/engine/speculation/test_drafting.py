"""How much is drafted: what is expected to pay, learned from every proposal."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from octavo.engine.speculation.drafter import Proposal
from octavo.engine.speculation.drafting import Drafting, num_drafts
from octavo.scheduler import ScheduledChunk, Step
from octavo.scheduler import Sequence as Served
from octavo.scheduler.drafts import UNKNOWN_COST, draft_cost
from octavo.scheduler.step_cost import StepCost
from octavo.scheduler.types import StepShape


class Always:
    """A drafter of one guess, right or wrong."""

    def __init__(self, match: int = 3) -> None:
        self.match = match

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        return Proposal([tokens[-1] + 1] * most, self.match)


@pytest.mark.parametrize(
    ("hold", "cost", "others", "expected"),
    [
        (1.0, 0.2, 0, 8),  # free lunch
        (0.0, 0.2, 0, 0),
        (0.2, 0.24, 0, 0),  # 1.2 tokens for 1.24 steps
        (0.3, 0.2, 0, 1),  # 1.3 for 1.2; a second one adds 0.09 for 0.2
        (0.9, 0.2, 0, 7),
        (0.9, 0.2, 7, 0),  # a step of eight that a row makes a fifth longer
        (0.9, 0.025, 7, 8),
    ],
)
def test_drafts_are_computed_while_they_pay(hold: float, cost: float, others: int, expected: int) -> None:
    assert num_drafts(hold, most=8, cost=cost, others=others) == expected
    rates = [(1 + others + sum(hold**i for i in range(1, k + 1))) / (1 + cost * k) for k in range(9)]
    assert max(rates) <= max(rates[expected], 1.03 * rates[0]) + 1e-9


def test_what_never_holds_is_soon_not_computed_any_more_and_still_watched() -> None:
    drafting, tokens, computed = Drafting(Always(), most=4), [0], []
    for step in range(200):
        computed.append(len(drafting.propose(tokens, 100, cost=0.2)))
        tokens.append(tokens[-1] + (1 if step >= 100 else 5))  # from then on the guess is right
    assert sum(computed[:100]) <= 5
    assert computed[90:100] == [0] * 10
    assert min(computed[120:]) >= 1, "it begins again without having been tried"


def test_an_estimate_of_a_row_that_is_too_high_is_tried_now_and_then() -> None:
    drafting, tokens, computed = Drafting(Always(), most=4), [0], []
    for _ in range(128):
        computed.append(len(drafting.propose(tokens, 1000, cost=1.5)))
        tokens.append(tokens[-1] + 1)
    assert sum(computed) == len(computed) / 32, "one row tells what rows cost"
    drafting, tokens, computed = Drafting(Always(), most=4), [0], []
    for _ in range(128):
        computed.append(len(drafting.propose(tokens, 1000, cost=1.5)))
        tokens.append(tokens[-1] + 5)
    assert not any(computed[64:]), "what does not hold is not tried"


def test_kinds_of_proposals_are_told_apart() -> None:
    """Chance finds of three tokens say nothing about a long quotation."""
    drafter = Always(match=3)
    drafting, tokens = Drafting(drafter, most=4), [0]
    for _ in range(50):
        drafting.propose(tokens, 100, cost=0.2)
        tokens.append(tokens[-1] + 5)
    drafter.match = 20
    assert len(drafting.propose(tokens, 100, cost=0.2)) == 4


def test_there_is_always_room_for_the_token_after_the_last_draft() -> None:
    drafting = Drafting(Always(match=30), most=8)
    assert [len(drafting.propose([1], room, cost=0.01)) for room in (4, 2, 1, 0)] == [3, 1, 0, 0]


def test_the_cost_of_a_row_is_learned_from_steps() -> None:
    cost = StepCost()
    step = Step(tuple(ScheduledChunk(Served(f"{i}", [1] * 9, 9), 8, 9, True) for i in range(2)))
    assert draft_cost(cost, step) == UNKNOWN_COST / 2
    for rows in (1, 2, 4, 8, 3, 5) * 20:
        cost.observe(StepShape(rows, 0, 9 * rows, 0), 0.010 + 0.002 * rows)
    assert draft_cost(cost, step) == pytest.approx(0.002 / 0.014, rel=0.05)


class Letters:
    """A grammar of numbers below ten, after which a 0 must follow."""

    def completed(self, drafts: Sequence[int], most: int) -> tuple[int, ...]:
        good = next((i for i, draft in enumerate(drafts) if draft > 9), len(drafts))
        return (*drafts[:good], 0)[:most]


def test_a_grammar_checks_drafts_and_goes_on() -> None:
    drafting = Drafting(Always(match=30), most=4, grammar=Letters())
    assert drafting.propose([3], 100, cost=0.01) == (4, 4, 4, 4)
    drafting = Drafting(Always(match=30), most=4, grammar=Letters())
    assert drafting.propose([9], 100, cost=0.01) == (0,), "10 may not follow"


def test_what_is_forced_is_a_kind_of_its_own() -> None:
    """A drafter that is always wrong takes nothing away from a grammar that never is."""
    drafting, tokens = Drafting(Always(match=3), most=1, grammar=Letters()), [9]
    for _ in range(60):
        drafting.propose(tokens, 100, cost=0.2)
        tokens.append(0 if tokens[-1] == 9 else 9)
    assert drafting.propose([*tokens, 9], 100, cost=0.2) == (0,)
    assert drafting.propose([*tokens, 4], 100, cost=0.2) == ()
