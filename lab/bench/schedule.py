"""``octavo bench schedule``: admission orders, compared on a simulated clock.

The scheduler and the block manager are real; a linear cost model gives the time of a step. The default costs
were measured on two CPU cores with a model of 0.6 billion parameters and 4-bit weights.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from octavo.block_manager import BlockManager
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.arguments.usage import above_zero, not_negative, positive
from octavo.engine.core.build import waiting_queue
from octavo.scheduler import Limits

from ..cache_sim.trace import read_trace
from ..plots.figure import require_matplotlib
from ..plots.schedule import plot
from .schedule_sim import Arrival, Outcome, SimulatedSwap, StepModel, simulate

ORDERS = {
    "fcfs": EngineConfig(),
    "lpm": EngineConfig(schedule_policy="lpm"),
    "vtc": EngineConfig(schedule_policy="vtc"),
    "dlpm": EngineConfig(schedule_policy="dlpm"),
}
FIXED = (64, 128, 256, 512)  # tokens in a step, for --rates
PAGE_SIZE = 32
TRACE_PAGE = 512  # tokens
VOCABULARY = 150_000


def light(rng: random.Random) -> list[Arrival]:
    """Return requests of one tenant: a prompt of 600 tokens about every ten seconds."""
    return [
        Arrival(10.0 * n + rng.random(), "light", _prompt(rng, 600), 32) for n in range(20)
    ]  # fmt: skip


def flood(rng: random.Random) -> list[Arrival]:
    """Return the requests of ``light``, and 64 prompts of 2,000 tokens from another tenant at the start."""
    burst = [Arrival(0.0, "heavy", _prompt(rng, 2000), 64) for _ in range(64)]
    return burst + light(rng)


def crowd(rng: random.Random) -> list[Arrival]:
    """Return 64 requests that share a cached prefix of 2,000 tokens: little prefill, long attention."""
    head = _prompt(rng, 2000)
    requests = [Arrival(10.0, "crowd", head + _prompt(rng, 32), 256) for _ in range(64)]
    return [Arrival(0.0, "first", head, 1), *requests]


def overload(rng: random.Random, rate: float = 0.3) -> list[Arrival]:
    """Return prompts of 2,000 tokens at random times, by default more than can be served."""
    arrivals, at_s = [], 0.0
    for _ in range(100):
        at_s += rng.expovariate(rate)
        arrivals.append(Arrival(at_s, "all", _prompt(rng, 2000), 48))
    return arrivals


def growth(rng: random.Random) -> list[Arrival]:
    """Return 64 simultaneous requests with long outputs, which would need 1.5 times the pool."""
    return [Arrival(0.0, "all", _prompt(rng, 1000), 2000) for _ in range(64)]


def shared(rng: random.Random) -> list[Arrival]:
    """Return bursts of requests from four tenants with eight long prefixes each; the pool cannot hold all."""
    heads = {(t, h): _prompt(rng, 1024) for t in range(4) for h in range(8)}
    arrivals = []
    for n in range(400):
        tenant, head = rng.randrange(4), rng.randrange(8)
        prompt = heads[tenant, head] + _prompt(rng, 64)
        arrivals.append(Arrival(10.0 * (n // 100), f"t{tenant}", prompt, 16, str(tenant).encode()))
    return arrivals


TRAFFIC: dict[str, Callable[[random.Random], list[Arrival]]] = {
    "light": light,
    "flood": flood,
    "shared": shared,
    "crowd": crowd,
    "overload": overload,
    "growth": growth,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--traffic", choices=TRAFFIC, action="append", help="pattern of requests to simulate; repeatable "
    "(default: all)")  # fmt: skip
    add("--trace", type=Path, metavar="FILE", help="recorded trace to simulate instead of --traffic, in the "
    "format of `octavo replay`")  # fmt: skip
    add("--tenant-field", metavar="NAME", help="field of the trace's requests that names the tenant")
    add("--requests", type=positive, default=200, metavar="N",
        help="number of requests to take from the start of the trace")  # fmt: skip
    add("--speed", type=above_zero, default=1.0, metavar="X",
        help="factor by which to speed up the trace's arrivals")  # fmt: skip
    add("--order", "--fairness", type=lambda name: "fcfs" if name == "off" else name, choices=ORDERS,
        action="append",
        help="order of admission, a value of --schedule-policy; repeatable (default: all)")  # fmt: skip
    add("--num-pages", type=positive, default=4096, metavar="N",
        help=f"size of the page pool in pages of {PAGE_SIZE} positions")  # fmt: skip
    add("--swap-pages", type=positive, metavar="N", help="size in pages of simulated swap memory for "
    "preempted requests (default: none)")  # fmt: skip
    add("--swap-page-ms", type=not_negative, default=0.2, metavar="MS",
        help="cost of copying a page to or from swap memory")  # fmt: skip
    add("--max-running", type=positive, default=64, metavar="N", help="maximum number of sequences in a step")
    add("--max-step-tokens", type=positive, default=512, metavar="N",
        help="maximum number of tokens in a step")  # fmt: skip
    add("--target-itl", type=_target, metavar="MS|auto", help="target inter-token latency to which "
        "prefill chunks are cut (default: none)")  # fmt: skip
    add("--target-ttft", type=above_zero, metavar="S", help="target time to first token of all requests, "
        "in seconds (default: none)")  # fmt: skip
    add("--rates", type=_rates, metavar="R,R", help="compare latency targets with fixed chunk sizes at R "
    "prompts of 2,000 tokens per second")  # fmt: skip
    add("--seeds", type=positive, default=3, metavar="N", help="number of seeds for --rates")
    add("--good-ttft", type=above_zero, default=10.0, metavar="S",
        help="longest time to first token, in seconds, that counts as goodput")  # fmt: skip
    add("--good-itl", type=above_zero, default=1.5, metavar="S",
        help="longest gap between tokens, in seconds, that counts as goodput")  # fmt: skip
    for name, value, text in (
        ("step", 28.0, "a step"),
        ("row", 0.5, "a decoding row"),
        ("prompt-token", 1.6, "a prompt token"),
        ("position", 0.2, "attending to 1,000 positions"),
    ):
        add(f"--{name}-ms", type=not_negative, default=value, metavar="MS", help=f"simulated cost of {text}")
    add("--plot", type=Path, metavar="FILE", help="image file for a plot of times to first token, "
    "fairness, waits and preemptions (needs matplotlib)")  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, Any]:
    require_matplotlib(args.plot)
    if args.rates:
        return {"bench": "schedule", "rates": _compare_rates(args)}
    results: dict[str, dict[str, Any]] = {}
    lines: dict[str, dict[str, list[float]]] = {}
    for name, arrivals in _traffic(args).items():
        for order in args.order or ORDERS:
            for swap_pages in (0, args.swap_pages)[: 2 if args.swap_pages else 1]:
                outcome = _simulated(args, arrivals, order, swap_pages=swap_pages)
                label = f"{order}+swap" if swap_pages else order
                figures = outcome.to_json(args.good_ttft, args.good_itl)
                results.setdefault(name, {})[label] = figures
                lines[f"{name}, {label}"] = outcome.lines()
                _print_row(name, label, figures)
    if args.plot is not None:
        plot(lines, args.plot)
    return {"bench": "schedule", "page_size": PAGE_SIZE, "num_pages": args.num_pages, "traffic": results}


def _simulated(
    args: argparse.Namespace,
    arrivals: list[Arrival],
    order: str,
    *,
    chunk: int | None = None,
    swap_pages: int = 0,
) -> Outcome:
    """Serve ``arrivals``; with ``chunk``, in fixed chunks of that size and without targets."""
    step_tokens = chunk or args.max_step_tokens
    blocks = BlockManager(args.num_pages, PAGE_SIZE, max_chunk=step_tokens)
    target_itl, target_ttft = (None, None) if chunk else (args.target_itl, args.target_ttft)
    limits = Limits(step_tokens, min(args.max_running, step_tokens), target_itl=target_itl)
    model = StepModel(args.step_ms, args.row_ms, args.prompt_token_ms, args.position_ms)
    swap = SimulatedSwap(blocks, swap_pages, args.swap_page_ms / 1e3) if swap_pages else None
    queue = waiting_queue(ORDERS[order], blocks)
    return simulate(arrivals, blocks, limits, queue, model, target_ttft_s=target_ttft, swap=swap)


def _target(text: str) -> float | Literal["auto"]:
    return "auto" if text == "auto" else above_zero(text) / 1e3


def _rates(text: str) -> list[float]:
    return [above_zero(part) for part in text.split(",")]


def _compare_rates(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare fixed chunk sizes with latency targets; print and return the goodput at each rate.

    Rates and goodput are in requests per second; goodput has one value per seed.
    """
    if args.target_itl is None:
        raise InvalidRequest("--rates compares a target with fixed chunks; add --target-itl MS")
    order = (args.order or ["fcfs"])[0]
    rows: list[dict[str, Any]] = []
    for rate in args.rates:
        fixed: dict[int, list[float]] = {tokens: [] for tokens in FIXED}
        targeted: list[float] = []
        for seed in range(1, args.seeds + 1):
            arrivals = overload(random.Random(seed), rate)
            for chunk, found in (*fixed.items(), (None, targeted)):
                outcome = _simulated(args, arrivals, order, chunk=chunk)
                found.append(rate * outcome.share_of_good(args.good_ttft, args.good_itl))
        rows.append({"rate_per_s": rate, "fixed": fixed, "targets": targeted})
        means = ", ".join(f"{tokens} {fmean(found):.3f}" for tokens, found in fixed.items())
        print(f"{rate:g} requests/s: goodput with targets {fmean(targeted):.3f}/s, with chunks of {means}")
    default = args.max_step_tokens if args.max_step_tokens in FIXED else FIXED[-1]
    for name, sizes in (("any of these chunks", FIXED), (f"chunks of {default}", (default,))):
        tokens, at = max(
            ((size, row) for size in sizes for row in rows), key=lambda pair: fmean(pair[1]["fixed"][pair[0]])
        )
        best = max(fmean(at["fixed"][tokens]), 1e-9)
        ratio = fmean(at["targets"]) / best
        most = max(fmean(row["targets"]) for row in rows) / best
        print(
            f"the knee of {name} ({tokens}, {at['rate_per_s']:g} requests/s): {ratio:.2f} times their "
            f"goodput there, {most:.2f} times at the targets' best rate"
        )
    return rows


def _traffic(args: argparse.Namespace) -> dict[str, list[Arrival]]:
    if args.trace is None:
        return {
            name: sorted(TRAFFIC[name](random.Random(1)), key=lambda a: a.at_s)
            for name in args.traffic or TRAFFIC
        }
    requests = read_trace(args.trace, page_size=TRACE_PAGE, salt_field=args.tenant_field)[: args.requests]
    room = args.num_pages * PAGE_SIZE
    arrivals = []
    for request in requests:
        prompt = [page % VOCABULARY for page in request.page_ids for _ in range(TRACE_PAGE)]
        if len(prompt) + request.output_tokens <= room:
            tenant, at_s = request.salt.decode(), request.timestamp_ms / 1e3 / args.speed
            arrivals.append(Arrival(at_s, tenant, prompt, max(1, request.output_tokens), request.salt))
    if not arrivals:
        raise InvalidRequest(f"no request of {args.trace} fits {room} positions; raise --num-pages")
    print(f"{len(arrivals)} requests of {args.trace}; {len(requests) - len(arrivals)} do not fit the pool")
    return {args.trace.name: arrivals}


def _print_row(traffic: str, order: str, figures: dict[str, Any]) -> None:
    ttft = ", ".join(f"{tenant or 'all'} {value:.2f}" for tenant, value in figures["ttft_p95_s"].items())
    print(
        f"{traffic:>12} {order:>9}: {figures['tokens_per_s']:7.1f} tokens/s, goodput "
        f"{figures['goodput_per_s']:.3f}/s, hits {figures['hit_ratio']:6.1%}, preemptions "
        f"{figures['preemptions']}, computed {figures['computed_tokens']}, pages out "
        f"{figures['pages_out']}, in {figures['pages_in']}, service gap {figures['service_gap']:.0f}, "
        f"p99 gap {figures['itl_p99_s'] * 1e3:.0f} ms, p95 TTFT (s): {ttft}"
    )


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(length)]
