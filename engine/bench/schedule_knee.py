"""Goodput under latency targets beside fixed chunks of prompts, as requests come faster.

Prompts of 2,000 tokens arrive at random, from several seeds. The knee of fixed chunks is the rate at which
their goodput is largest: beyond it more requests are late the more of them come.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo.block_manager import BlockManager
from octavo.scheduler import Limits
from octavo.scheduler.waiting import WaitingQueue

from .schedule_sim import Arrival, StepModel, simulate

FIXED = (64, 128, 256, 512)  # tokens of a step


@dataclass(frozen=True, slots=True)
class Service:
    """What is simulated: pages of the pool, and what makes a request's service good, in seconds."""

    num_pages: int
    page_size: int
    max_running: int
    model: StepModel
    queue: Callable[[BlockManager], WaitingQueue]
    good_ttft: float
    good_itl: float

    def goodput(
        self,
        arrivals: Sequence[Arrival],
        step_tokens: int,
        target_itl: float | Literal["auto"] | None,
        target_ttft: float | None,
    ) -> float:
        """The share of these requests that were served well."""
        blocks = BlockManager(self.num_pages, self.page_size, max_chunk=step_tokens)
        limits = Limits(step_tokens, min(self.max_running, step_tokens), target_itl=target_itl)
        outcome = simulate(
            arrivals, blocks, limits, self.queue(blocks), self.model, target_ttft_s=target_ttft
        )
        return outcome.share_of_good(self.good_ttft, self.good_itl)


def compare(
    service: Service,
    traffic: Callable[[random.Random, float], list[Arrival]],
    rates: Sequence[float],
    num_seeds: int,
    *,
    target_itl: float | Literal["auto"],
    target_ttft: float | None,
    step_tokens: int,
) -> list[dict[str, Any]]:
    """Print and return goodput per rate, in requests per second: of each size of fixed chunks, and under the
    targets; one number for each seed."""
    rows: list[dict[str, Any]] = []
    for rate in rates:
        fixed: dict[int, list[float]] = {tokens: [] for tokens in FIXED}
        targeted: list[float] = []
        for seed in range(1, num_seeds + 1):
            arrivals = traffic(random.Random(seed), rate)
            for tokens, found in fixed.items():
                found.append(rate * service.goodput(arrivals, tokens, None, None))
            targeted.append(rate * service.goodput(arrivals, step_tokens, target_itl, target_ttft))
        rows.append({"rate_per_s": rate, "fixed": fixed, "targets": targeted})
        means = ", ".join(f"{tokens} {_mean(found):.3f}" for tokens, found in fixed.items())
        print(f"{rate:g} requests/s: goodput with targets {_mean(targeted):.3f}/s, with chunks of {means}")
    default = step_tokens if step_tokens in FIXED else FIXED[-1]
    for name, sizes in (("any of these chunks", FIXED), (f"chunks of {default}", (default,))):
        tokens, at = max(
            ((size, row) for size in sizes for row in rows), key=lambda pair: _mean(pair[1]["fixed"][pair[0]])
        )
        ratio = _mean(at["targets"]) / max(_mean(at["fixed"][tokens]), 1e-9)
        most = max(_mean(row["targets"]) for row in rows) / max(_mean(at["fixed"][tokens]), 1e-9)
        print(
            f"the knee of {name} ({tokens}, {at['rate_per_s']:g} requests/s): {ratio:.2f} times their "
            f"goodput there, {most:.2f} times at the targets' best rate"
        )
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
