from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, chain
from operator import mul

import pytest

from octavo.engine.speculation.acceptance_rates import FORCED, AcceptanceRates
from octavo.engine.speculation.drafter import Proposal
from octavo.engine.speculation.drafting import Drafting, Speculation, allocate, min_acceptance, num_drafts
from octavo.scheduler import Sequence as Served


class Always:
    def __init__(self, match: int = 3) -> None:
        self.match = match
        self.num_asked = 0
        self.num_right = 0

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        self.num_asked += 1
        return Proposal([tokens[-1] + 1 + i for i in range(most)], self.match + self.num_right)


@pytest.mark.parametrize(
    ("acceptance", "cost", "others", "expected"),
    [
        (1.0, 0.2, 0, 8),
        (0.0, 0.2, 0, 0),
        (0.2, 0.24, 0, 0),
        (0.3, 0.2, 0, 1),
        (0.9, 0.2, 0, 7),
        (0.9, 0.2, 7, 0),
        (0.9, 0.025, 7, 8),
    ],
)
def test_drafts_are_computed_while_they_pay(
    acceptance: float, cost: float, others: int, expected: int
) -> None:
    assert num_drafts(acceptance, max_drafts=8, cost=cost, others=others) == expected
    rates = [(1 + others + sum(acceptance**i for i in range(1, k + 1))) / (1 + cost * k) for k in range(9)]
    assert max(rates) <= max(rates[expected], 1.08 * rates[0]) + 1e-9


class Going:
    def __init__(self, drafter: Always, *, most: int = 4, engine: Speculation | None = None) -> None:
        self.engine = engine or Speculation("ngram", max_drafts=most)
        self.sequence = Served("", [0], 10**6)
        (made,) = self.engine.begin(None, [None], num_prompt=1, owner=0)
        assert made is not None
        made._drafter = drafter
        self.drafting: Drafting | None = made
        self.drafter = drafter
        self.tokens_left = 10**6

    def step(self, right: bool, *, cost: float = 0.2) -> int:
        self.engine.allocate([self], 1, [(number, 1 + cost * number) for number in range(1, 9)])
        self.sequence.tokens.append(self.sequence.tokens[-1] + (1 if right else 5))
        self.drafter.num_right = self.drafter.num_right + 1 if right else 0
        assert self.drafting is not None
        return len(self.drafting.drafts)


@pytest.mark.parametrize(("cost", "asked"), [(0.9, 200), (1.5, 2)])
def test_samples_search_unless_even_certain_drafts_would_not_pay(cost: float, asked: int) -> None:
    drafter = Always()
    going = Going(drafter)
    for _ in range(200):
        going.step(True, cost=cost)
    assert drafter.num_asked == asked


def test_a_cost_that_is_too_high_is_tried_less_and_less_often() -> None:
    going = Going(Always())
    computed = [going.step(True, cost=1.5) for _ in range(600)]
    tried = [at for at, count in enumerate(computed) if count]
    assert {computed[at] for at in tried} == {4}, "as many as would pay tell what they cost"
    assert len(tried) == 3
    assert tried[2] - tried[1] > 1.5 * (tried[1] - tried[0])
    going = Going(Always())
    assert not any(going.step(False, cost=1.5) for _ in range(256)), "what does not hold is not tried"


def test_a_request_begins_with_the_engines_acceptance_rates() -> None:
    first = Going(Always())
    assert first.step(True) == 0, "three tokens in common say little, as long as nothing is known"
    for place in range(300):
        first.step(place % 15 > 0)
    assert Going(Always(), engine=first.engine).step(True) >= 2
    rates = AcceptanceRates(first.engine._acceptance)
    for _ in range(4):
        rates.learn(3, False)
    assert rates[3] < 0.4, "and soon with what it sees itself"
    assert first.engine._acceptance.rates[0] > 0.7, "one request does not decide for all"


def test_own_short_matches_outweigh_long_matches_of_others() -> None:
    rates = AcceptanceRates()
    for match in range(3, 40):
        for _ in range(40):
            rates.learn(match, True)
    mine = AcceptanceRates(rates._engine)
    assert min(mine.of_run(3, 20)) > 0.8
    for _ in range(12):
        mine.learn(3, False)
    assert mine[3] < 0.2
    assert mine[4] <= 0.21
    assert mine[20] == pytest.approx(0.8), "of a long quotation what a new engine believes"
    for _ in range(8):
        mine.learn(20, True)
    assert mine[20] > 0.9, "and what it sees"
    assert mine[FORCED] == 0.9


def test_a_name_is_drafted_to_its_end_and_no_further() -> None:
    rates = AcceptanceRates()
    for _ in range(60):
        rates.learn(3, True)
        rates.learn(4, False)
    assert allocate([rates.of_run(3, 8)], 1, [(n, 1 + 0.3 * n) for n in range(1, 9)]) == [1]


def guess(drafting: Drafting, tokens: list[int], tokens_left: int) -> tuple[int, ...]:
    drafting.search(tokens, tokens_left)
    return drafting.rated_drafts()[0]


ROWS = [(number, 1 + 0.02 * number) for number in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)]


@pytest.mark.parametrize(
    ("acceptances", "plain", "expected"),
    [
        ([], 1, []),
        ([(0.9, 4)], 8, [4]),
        ([(0.9, 8), (0.0, 8)], 2, [8, 0]),
        ([(0.1, 8)] * 8, 8, [0] * 8),
        ([(0.99, 8), (0.5, 8)], 2, [8, 4]),
        ([(0.9, 1)] * 5, 5, [1, 1, 1, 1, 0]),
    ],
)
def test_the_likeliest_drafts_come_first(
    acceptances: list[tuple[float, int]], plain: int, expected: list[int]
) -> None:
    assert allocate([[acceptance] * most for acceptance, most in acceptances], plain, ROWS) == expected


def test_the_number_of_drafts_maximizes_tokens_per_second() -> None:
    rng = random.Random(1)
    num_chosen = 0
    for _ in range(300):
        acceptances = [[rng.random() for _ in range(rng.randint(0, 8))] for _ in range(rng.randint(1, 9))]
        plain = len(acceptances) + rng.randint(0, 3)
        cost = rng.choice([0.01, 0.05, 0.2])
        ratios = [(number, 1 + cost * number**1.2) for number, _ in ROWS]
        counts = allocate(acceptances, plain, ratios)
        assert all(count <= len(holds) for count, holds in zip(counts, acceptances, strict=True))
        reached = [list(accumulate(holds, mul)) for holds in acceptances]
        chances = sorted(chain.from_iterable(reached), reverse=True)
        rates = {n: (plain + sum(chances[:n])) / ratio for n, ratio in ratios if n <= len(chances)}
        gained = plain + sum(sum(each[:count]) for each, count in zip(reached, counts, strict=True))
        if chosen := sum(counts):
            num_chosen += 1
            assert gained / dict(ratios)[chosen] == pytest.approx(max(rates.values()))
            assert max(holds[0] for holds in acceptances if holds) >= min_acceptance(plain, ratios)
        else:
            assert max(rates.values(), default=0.0) <= 1.08 * plain * (1 + 1e-9)
    assert 50 < num_chosen < 250


class Letters:
    def completed(self, drafts: Sequence[int], most: int) -> tuple[int, ...]:
        good = next((i for i, draft in enumerate(drafts) if draft > 9), len(drafts))
        return (*drafts[:good], 0)[:most]


def test_a_grammar_checks_drafts_and_continues() -> None:
    drafting = Drafting(Always(match=30), max_drafts=4, grammar=Letters())
    assert guess(drafting, [3], 100) == (4, 5, 6, 7)
    drafting = Drafting(Always(match=30), max_drafts=4, grammar=Letters())
    assert guess(drafting, [8], 100) == (9, 0), "10 may not follow"
