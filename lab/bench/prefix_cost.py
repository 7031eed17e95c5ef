"""The cost of the prefix cache if no request hits."""

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

CHANCE = 0.05


@dataclass(frozen=True, slots=True)
class Share:
    """Relative increase of a time: median over pairs, with a 90 % confidence interval."""

    median: float
    low: float
    high: float


def share(times: Sequence[float], base: Sequence[float]) -> Share:
    """Return the increase of ``times`` over ``base``, measured in pairs.

    The interval comes from the sign test; with too few pairs it is the whole range of ratios.
    """
    ratios = sorted(time / other - 1 for time, other in zip(times, base, strict=True))
    count, below, rank = len(ratios), 0.5 ** len(ratios), 0
    term = below
    while below < CHANCE and rank < count // 2:
        rank += 1
        term *= (count - rank + 1) / rank
        below += term
    rank = max(rank - 1, 0)
    return Share(statistics.median(ratios), ratios[rank], ratios[count - 1 - rank])


def cost_without_reuse(bench: Bench, *, prompt_tokens: int, rounds: int) -> dict[str, Any]:
    """Compare the time of prompts that share nothing, with the prefix cache on and off.

    The engines step in a random order, so that a slowdown of the machine affects all of them. The pool is
    full from the start, so each new page needs an eviction. The engines share the pool's memory, so only
    their times are valid.
    """
    cores = {"off": bench.core(prefix_cache=False), "control": bench.core(prefix_cache=False)}
    cores["on"] = bench.core(used=True)
    rng = np.random.default_rng(SEED)
    times: dict[str, list[float]] = {name: [] for name in cores}
    for number in range(rounds + 1):
        taken = _round(bench, cores, prompt_tokens, rng)
        if number:
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
    taken = dict.fromkeys(cores, 0.0)
    for core in cores.values():
        core.add(request_of(core, bench.tokens(prompt_tokens), answer_of(ANSWER_TOKENS)))
    while busy := [name for name, core in cores.items() if core.has_work]:
        for name in rng.permutation(busy):
            began = time.perf_counter()
            cores[name].step()
            taken[name] += time.perf_counter() - began
    return taken
