"""How much is drafted: what is expected to pay, learned from every proposal."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from octavo.engine.speculation.allotment import allot
from octavo.engine.speculation.drafter import Proposal
from octavo.engine.speculation.drafting import Drafting, HoldRates, Speculation, num_drafts
from octavo.scheduler import Sequence as Served


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
    assert max(rates) <= max(rates[expected], 1.08 * rates[0]) + 1e-9


class Going:
    """A sample that goes on, and steps whose drafts cost ``cost`` each."""

    def __init__(self, drafter: Always, *, most: int = 4, engine: Speculation | None = None) -> None:
        self.engine = engine or Speculation("ngram", most=most)
        self.sequence = Served("", [0], 10**6)
        self.drafting: Drafting | None = Drafting(drafter, most=most, engine=self.engine._hold)
        self.room = 10**6

    def step(self, right: bool, *, cost: float = 0.2) -> int:
        """How many drafts the next step computes; then the token comes that was guessed, or another."""
        self.engine.allot([self], lambda _, most: [(n, 1 + cost * n) for n in range(1, most + 1)])
        self.sequence.tokens.append(self.sequence.tokens[-1] + (1 if right else 5))
        return len(self.sequence.drafts)


def test_what_never_holds_is_not_computed_and_still_watched() -> None:
    going = Going(Always())
    assert sum(going.step(False) for _ in range(100)) == 0
    computed = [going.step(True) for _ in range(100)]
    assert min(computed[40:]) >= 1, "it begins again without having been tried"


def test_a_cost_that_is_too_high_is_tried_now_and_then() -> None:
    going = Going(Always())
    computed = [going.step(True, cost=1.5) for _ in range(256)]
    assert [count for count in computed if count] == [4] * 4, "as many as would pay tell what they cost"
    going = Going(Always())
    assert not any(going.step(False, cost=1.5) for _ in range(256)), "what does not hold is not tried"


def test_a_request_begins_with_what_its_engine_has_learned() -> None:
    first = Going(Always())
    assert first.step(True) == 0, "three tokens in common say little, as long as nothing is known"
    for _ in range(60):
        first.step(True)
    assert Going(Always(), engine=first.engine).step(True) == 4
    rates = HoldRates(first.engine._hold)
    for _ in range(4):
        rates.learn(0, False)
    assert rates[0] < 0.6, "and soon with what it sees itself"
    assert first.engine._hold[0] > 0.8, "one request does not decide for all"


def test_kinds_of_proposals_are_told_apart() -> None:
    """Chance finds of three tokens say nothing about a long quotation."""
    drafter = Always(match=3)
    going = Going(drafter)
    for _ in range(50):
        going.step(False)
    drafter.match = 20
    assert going.step(True) == 4


def test_there_is_always_room_for_the_token_after_the_last_draft() -> None:
    drafting = Drafting(Always(match=30), most=8)
    assert [len(drafting.propose([1], room)[0]) for room in (4, 2, 1, 0)] == [3, 1, 0, 0]


ROWS = [(number, 1 + 0.02 * number) for number in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)]


@pytest.mark.parametrize(
    ("wishes", "plain", "expected"),
    [
        ([], 1, []),
        ([(0.9, 4)], 8, [4]),
        ([(0.9, 8), (0.0, 8)], 2, [8, 0]),
        ([(0.1, 8)] * 8, 8, [0] * 8),  # 1.6 per cent more tokens: hardly anything
        ([(0.99, 8), (0.5, 8)], 2, [8, 4]),
        ([(0.9, 1)] * 5, 5, [1, 1, 1, 1, 0]),  # five is no number of rows that steps have
    ],
)
def test_the_likeliest_drafts_come_first(
    wishes: list[tuple[float, int]], plain: int, expected: list[int]
) -> None:
    assert allot(wishes, plain, ROWS) == expected


def test_no_other_number_of_drafts_makes_more_tokens_of_a_steps_time() -> None:
    rng = random.Random(1)
    for _ in range(300):
        wishes = [(rng.random(), rng.randint(0, 8)) for _ in range(rng.randint(1, 9))]
        plain = len(wishes) + rng.randint(0, 3)
        cost = rng.choice([0.01, 0.05, 0.2])
        ratios = [(number, 1 + cost * number**1.2) for number, _ in ROWS]
        counts = allot(wishes, plain, ratios)
        assert all(count <= most for count, (_, most) in zip(counts, wishes, strict=True))
        chances = sorted((hold**rank for hold, most in wishes for rank in range(1, most + 1)), reverse=True)
        rates = {n: (plain + sum(chances[:n])) / ratio for n, ratio in ratios if n <= len(chances)}
        chosen = sum(counts)
        gained = plain + sum(
            h**rank for (h, _), c in zip(wishes, counts, strict=True) for rank in range(1, c + 1)
        )
        if chosen:
            assert gained / dict(ratios)[chosen] == pytest.approx(max(rates.values()))
        else:
            assert max(rates.values(), default=0.0) <= 1.08 * plain * (1 + 1e-9)


class Letters:
    """A grammar of numbers below ten, after which a 0 must follow."""

    def completed(self, drafts: Sequence[int], most: int) -> tuple[int, ...]:
        good = next((i for i, draft in enumerate(drafts) if draft > 9), len(drafts))
        return (*drafts[:good], 0)[:most]


def test_a_grammar_checks_drafts_and_goes_on() -> None:
    drafting = Drafting(Always(match=30), most=4, grammar=Letters())
    assert drafting.propose([3], 100)[0] == (4, 4, 4, 4)
    drafting = Drafting(Always(match=30), most=4, grammar=Letters())
    assert drafting.propose([9], 100)[0] == (0,), "10 may not follow"


def test_what_is_forced_is_a_kind_of_its_own() -> None:
    """A drafter that is always wrong takes nothing away from a grammar that never is."""
    drafting, tokens = Drafting(Always(match=3), most=1, grammar=Letters()), [9]
    for _ in range(60):
        drafting.propose(tokens, 100)
        tokens.append(0 if tokens[-1] == 9 else 9)
    forced, hold = drafting.propose([*tokens, 9], 100)
    assert (forced, hold > 0.9) == ((0,), True)
    guessed, hold = drafting.propose([*tokens, 4], 100)
    assert (guessed, hold < 0.1) == ((5,), True)
