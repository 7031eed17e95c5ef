"""``octavo bench machines``: what several machines send per step, and how many workers a router carries.

Nothing is measured here. Bytes follow from shapes. Times follow from assumed links and from measured costs
of the router. A step reads all weights once; reads of pages are not counted.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from octavo.engine.arguments.usage import counts, positive

ROWS = (1, 8, 64)
VALUE_BYTES = 2  # bytes of a hidden value
BITS_PER_WEIGHT = 4.5  # 4-bit codes with a 16-bit scale and bias per 64 weights
SUMS_PER_LAYER = 2  # after attention and after the MLP
SIMULATED_S = 4.0


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    layers: int
    hidden: int
    parameters: float

    @property
    def weight_bytes(self) -> float:
        return self.parameters * BITS_PER_WEIGHT / 8


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two machines; ``delay_s`` is the time of an empty message, software included."""

    name: str
    bytes_per_s: float
    delay_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.delay_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class RouterCost:
    """CPU seconds of a router; ``idle`` and ``idle_worker`` are per second."""

    request_s: float
    prompt_token_s: float
    output_token_s: float
    idle: float
    idle_worker: float

    def admission_s(self, prompt_tokens: int) -> float:
        return self.request_s + prompt_tokens * self.prompt_token_s


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of one worker."""

    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float


SHAPES = (
    Shape("8B", 32, 4096, 8.03e9),  # Llama 3.1
    Shape("70B", 80, 8192, 70.6e9),
    Shape("400B", 126, 16384, 405.9e9),
)
LINKS = (
    Link("Thunderbolt, 80 Gb/s", 10e9, 50e-6),
    Link("10 GbE", 1.25e9, 50e-6),
    Link("RDMA, 80 Gb/s", 10e9, 5e-6),
)
# Tokens per second by rows: a 0.6B model in 4 bits on Zen 5, docs/benchmarks/results/2026-11-26-peers.json.
CPU_TOKENS_PER_S = {1: 138.8, 8: 545.0, 32: 644.0}
CPU_PARAMETERS = 596e6
# Medians of docs/benchmarks/results/2026-11-30-router-cost.json.
ROUTER = RouterCost(
    request_s=1789.5e-6, prompt_token_s=10.1e-6, output_token_s=95.3e-6, idle=9250e-6, idle_worker=750e-6
)
CONVERSATIONS = Traffic(prompt_tokens=12_035, output_tokens=343, tokens_per_s=100.0)  # means of the trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=positive, default=2, metavar="N", help="number of machines that share a model")
    add("--workers", type=counts, default="1,10,100,300,1000", metavar="N,N",
        help="numbers of workers behind one router")  # fmt: skip
    add("--worker-tokens-per-s", type=positive, default=100, metavar="N",
        help="output tokens per second of each worker")  # fmt: skip
    add("--prompt-tokens", type=positive, default=CONVERSATIONS.prompt_tokens, metavar="N",
        help="mean length of a prompt in tokens, for the router")  # fmt: skip
    add("--output-tokens", type=positive, default=CONVERSATIONS.output_tokens, metavar="N",
        help="mean length of an output in tokens, for the router")  # fmt: skip
    add("--router-cores", type=counts, default="2,16,64", metavar="N,N",
        help="numbers of cores of the router's machine")  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, Any]:
    traffic = Traffic(args.prompt_tokens, args.output_tokens, args.worker_tokens_per_s)
    sent = [step_row(shape, rows, link, args.ranks) for shape in SHAPES for rows in ROWS for link in LINKS]
    routed = [
        {
            "workers": count,
            "busy_cores": busy_cores(ROUTER, traffic, count),
            "token_delay_s": {
                str(cores): token_delays(ROUTER, traffic, count, cores) for cores in args.router_cores
            },
        }
        for count in args.workers
    ]
    result = {
        "bench": "machines",
        "ranks": args.ranks,
        "links": [asdict(link) for link in LINKS],
        "steps": sent,
        "cpu_steps": [cpu_row(rows, link, args.ranks) for rows in CPU_TOKENS_PER_S for link in LINKS],
        "router_cost": asdict(ROUTER),
        "traffic": asdict(traffic),
        "router": routed,
    }
    _print_tables(result)
    return result


def tensor_bytes(hidden: int, ranks: int) -> float:
    """Return the bytes that a rank sends per layer and row.

    Two ranks reduce in place; more ranks gather all parts and add them in order (``RankSum``).
    """
    parts = 2 * (ranks - 1) / ranks if ranks == 2 else ranks - 1
    return SUMS_PER_LAYER * parts * hidden * VALUE_BYTES


def tensor_s(shape: Shape, rows: int, link: Link, ranks: int) -> float:
    """Return the seconds that the sums of a step take on a ring of ranks."""
    messages = 2 * (ranks - 1) if ranks == 2 else ranks - 1
    num_bytes = rows * tensor_bytes(shape.hidden, ranks) / SUMS_PER_LAYER
    return SUMS_PER_LAYER * shape.layers * messages * link.seconds(num_bytes / messages)


def pipeline_s(shape: Shape, rows: int, link: Link, ranks: int) -> float:
    """Return the seconds that a step's rows take from the first rank to the last."""
    return (ranks - 1) * link.seconds(rows * shape.hidden * VALUE_BYTES)


def pipeline_wins_above(shape: Shape, rows: int, link: Link, ranks: int) -> float | None:
    """Return the memory rate (bytes/s) above which a pipeline step is faster, or None if no rate is.

    Let W be the bytes of the weights, N the number of ranks and r the memory rate of a machine. A
    tensor-parallel step takes W / (N r) plus its sums, and a pipeline step takes W / r plus its sends.
    """
    saved = tensor_s(shape, rows, link, ranks) - pipeline_s(shape, rows, link, ranks)
    return shape.weight_bytes * (1 - 1 / ranks) / saved if saved > 0 else None


def step_row(shape: Shape, rows: int, link: Link, ranks: int) -> dict[str, Any]:
    return {
        "model": shape.name,
        "rows": rows,
        "link": link.name,
        "tensor_bytes": rows * shape.layers * tensor_bytes(shape.hidden, ranks),
        "tensor_s": tensor_s(shape, rows, link, ranks),
        "pipeline_bytes": rows * shape.hidden * VALUE_BYTES * (ranks - 1),
        "pipeline_s": pipeline_s(shape, rows, link, ranks),
        "pipeline_wins_above_bytes_per_s": pipeline_wins_above(shape, rows, link, ranks),
    }


def cpu_row(rows: int, link: Link, ranks: int) -> dict[str, Any]:
    """Return decode times of the 8B model on CPUs, scaled from a smaller model by number of weights."""
    shape = SHAPES[0]
    alone = rows / CPU_TOKENS_PER_S[rows] * shape.parameters / CPU_PARAMETERS
    return {
        "rows": rows,
        "link": link.name,
        "alone_s": alone,
        "tensor_s": alone / ranks + tensor_s(shape, rows, link, ranks),
        "pipeline_s": alone + pipeline_s(shape, rows, link, ranks),
    }


def busy_cores(cost: RouterCost, traffic: Traffic, workers: int) -> float:
    """Return the CPU seconds that the router needs per second."""
    request_s = cost.admission_s(traffic.prompt_tokens) + traffic.output_tokens * cost.output_token_s
    rate = workers * traffic.tokens_per_s / traffic.output_tokens
    return rate * request_s + cost.idle + workers * cost.idle_worker


def token_delays(
    cost: RouterCost, traffic: Traffic, workers: int, cores: int, seed: int = 0
) -> dict[str, float] | None:
    """Return percentiles of the delay that a router adds to a token, or None if it cannot keep up.

    Requests arrive at random (Poisson), and their tokens are spread evenly over 10 seconds. Each job occupies
    one of ``cores`` cores, first come, first served.
    """
    if busy_cores(cost, traffic, workers) >= cores:
        return None
    arrived, work = _jobs(cost, traffic, workers * traffic.tokens_per_s / traffic.output_tokens, seed)
    delays = (_waits(arrived, work, cores) + work)[work == cost.output_token_s]
    p50, p99 = np.percentile(delays, (50, 99)).tolist() if len(delays) else (0.0, 0.0)
    return {"p50": p50, "p99": p99}


def _jobs(cost: RouterCost, traffic: Traffic, rate: float, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    answer_s = 10.0
    requests = rng.uniform(-answer_s, SIMULATED_S, rng.poisson(rate * (answer_s + SIMULATED_S)))
    steps = np.linspace(0, answer_s, traffic.output_tokens, endpoint=False)
    tokens = (requests[:, None] + steps).ravel()
    tokens = tokens[(tokens >= 0) & (tokens < SIMULATED_S)]
    admitted = requests[requests >= 0]
    arrived = np.concatenate([tokens, admitted])
    work = np.full(len(arrived), cost.output_token_s)
    work[len(tokens) :] = cost.admission_s(traffic.prompt_tokens)
    order = np.argsort(arrived, kind="stable")
    return arrived[order], work[order]


def _waits(arrived: Any, work: Any, cores: int) -> Any:
    free = [0.0] * cores
    waits = np.empty(len(arrived))
    for index, (at, seconds) in enumerate(zip(arrived.tolist(), work.tolist(), strict=True)):
        start = max(at, free[0])
        heapq.heapreplace(free, start + seconds)
        waits[index] = start - at
    return waits


def _print_tables(result: dict[str, Any]) -> None:
    steps, ranks = result["steps"], result["ranks"]
    names = list(dict.fromkeys(row["link"] for row in steps))
    by_step: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in steps:
        by_step.setdefault((row["model"], row["rows"]), []).append(row)
    shapes = {shape.name: shape for shape in SHAPES}
    _table(
        ["model", "sequences", "tensor, per layer and token", "tensor, per step", "pipeline, per step"],
        [
            [
                model,
                f"{rows}",
                _bytes(tensor_bytes(shapes[model].hidden, ranks)),
                _bytes(links[0]["tensor_bytes"]),
                _bytes(links[0]["pipeline_bytes"]),
            ]
            for (model, rows), links in by_step.items()
        ],
    )
    for title, cell in (
        ("tensor / pipeline, ms", _step_times),
        ("pipeline is faster from, GB/s", _pipeline_rate),
    ):
        _table(
            [title, "sequences", *names],
            [[model, f"{rows}", *map(cell, links)] for (model, rows), links in by_step.items()],
        )
    _table(
        ["8B on CPUs, sequences", "link", "one machine, ms", "tensor, ms", "pipeline, ms"],
        [
            [
                f"{row['rows']}",
                row["link"],
                *(f"{1000 * row[key]:,.1f}" for key in ("alone_s", "tensor_s", "pipeline_s")),
            ]
            for row in result["cpu_steps"]
        ],
    )
    cores = result["router"][0]["token_delay_s"]
    _table(
        ["workers", "busy cores", *(f"token delay with {count} cores, p50 / p99" for count in cores)],
        [
            [f"{row['workers']:,}", f"{row['busy_cores']:.2f}", *map(_delay, row["token_delay_s"].values())]
            for row in result["router"]
        ],
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for cells in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(cells)} |")
    print()


def _bytes(value: float) -> str:
    return f"{value / 1e6:,.2f} MB" if value >= 1e6 else f"{value / 1e3:,.1f} kB"


def _step_times(row: dict[str, Any]) -> str:
    return f"{1000 * row['tensor_s']:,.2f} / {1000 * row['pipeline_s']:.2f}"


def _pipeline_rate(row: dict[str, Any]) -> str:
    rate = row["pipeline_wins_above_bytes_per_s"]
    return "never" if rate is None else f"{rate / 1e9:,.0f}"


def _delay(delays: dict[str, float] | None) -> str:
    return (
        "too slow" if delays is None else " / ".join(f"{1000 * delays[key]:.2f} ms" for key in ("p50", "p99"))
    )
