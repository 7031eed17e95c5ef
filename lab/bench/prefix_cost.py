"""What the prefix cache costs where nothing is ever found, with what the measurement can tell apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from octavo.engine.core.engine_core import EngineCore

from .drive import request_of
from .prefix_runs import ANSWER_TOKENS, SEED, Bench, answer_of

CHANCE = 0.05  # that the truth lies below, and above, an interval


@dataclass(frozen=True, slots=True)
class Share:
    """By how much more time something took, as a share: the median of pairs, and where the median of
    endlessly many would lie with a chance of nine in ten."""

    median: float
    low: float
    high: float


def share(times: Sequence[float], base: Sequence[float]) -> Share:
    """Of times over those measured beside them. The interval is that of the sign test: order statistics,
    whatever the distribution; all of the range where there are too few pairs for less."""
    ratios = sorted(time / other - 1 for time, other in zip(times, base, strict=True))
    count, below, rank = len(ratios), 0.5 ** len(ratios), 0
    term = below  # P(exactly ``rank`` of the ratios lie below the true median); ``below``: at most so many
    while below < CHANCE and rank < count // 2:
        rank += 1
        term *= (count - rank + 1) / rank
        below += term
    rank = max(rank - 1, 0)
    return Share(statistics.median(ratios), ratios[rank], ratios[count - 1 - rank])


def cost_without_reuse(bench: Bench, *, prompt_tokens: int, rounds: int) -> dict[str, Any]:
    """By how much more time prompts that share nothing take with the cache on than with it off, and as
    a control, with it off than with it off.

    Three engines take their steps in turn, in an order drawn anew each time, so that whatever slows the
    machine for more than a step slows all of them; a round, one request each, gives one pair. The cache
    has been through its whole pool before: each page it takes is evicted first, and was written longest ago.

    They share the pool's memory, so what they answer is nonsense; how long it takes is not.
    """
    cores = {"off": bench.core(prefix_cache=False), "control": bench.core(prefix_cache=False)}
    cores["on"] = bench.core(used=True)
    rng = np.random.default_rng(SEED)
    times: dict[str, list[float]] = {name: [] for name in cores}
    for number in range(rounds + 1):
        taken = _round(bench, cores, prompt_tokens, rng)
        if number:  # the first one warms up
            for name, seconds in taken.items():
                times[name].append(seconds)
    cost, control = (share(times[name], times["off"]) for name in ("on", "control"))
    return {
        "prompt_tokens": prompt_tokens,
        "rounds": rounds,
        "on_s": statistics.median(times["on"]),
        "off_s": statistics.median(times["off"]),
        "cost": cost.median,
        "cost_interval": [cost.low, cost.high],
        "control": asdict(control),
    }


def _round(
    bench: Bench, cores: dict[str, EngineCore], prompt_tokens: int, rng: np.random.Generator
) -> dict[str, float]:
    """Serve a request on each core, step by step in turn; seconds that each took."""
    taken = dict.fromkeys(cores, 0.0)
    for core in cores.values():
        core.add(request_of(core, bench.tokens(prompt_tokens), answer_of(ANSWER_TOKENS)))
    while busy := [name for name, core in cores.items() if core.has_work]:
        for name in rng.permutation(busy):
            began = time.perf_counter()
            cores[name].step()
            taken[name] += time.perf_counter() - began
    return taken
