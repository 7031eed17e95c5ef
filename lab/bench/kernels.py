"""``octavo bench kernels``: rates of attention and linear layers, next to the machine's measured limits."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, get_args

from tqdm import tqdm

from octavo.engine.api.errors import InvalidConfig
from octavo.engine.arguments.usage import counts, positive
from octavo.engine.memory.budget import available_memory
from octavo.kernels import FORMAT_NAMES
from octavo.kernels.backends import (
    BackendName,
    choose_backend,
    native_instructions,
    set_up_device,
)

from ..kernels.kernel_timings import (
    QUICK,
    AttentionTiming,
    LinearTiming,
    Timing,
    time_attention,
    time_linear,
)
from ..kernels.roofline import Roofline, measure_roofline
from .arguments import format_names, weight_names

CONTEXTS, CHUNK, ROWS, PLAIN_ROWS = (512, 4096, 32768), 512, (1, 8, 32, 512), (1, 8)
QUICK_CONTEXTS, QUICK_CHUNK, QUICK_ROWS = (1024,), 128, (1, 8, 128)


def _shown(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", choices=get_args(BackendName), default="auto", help="backend whose kernels are measured")
    add("--threads", type=positive, metavar="N", help="number of CPU threads (default: all)")
    add("--contexts", type=counts, metavar="N,N", help="lengths of sequences in tokens "
        f"(default: {_shown(CONTEXTS)})")  # fmt: skip
    add("--formats", type=format_names, default=",".join(FORMAT_NAMES), metavar="F,F",
        help="page formats to measure")  # fmt: skip
    add("--chunk", type=positive, metavar="N", help=f"number of tokens in a prompt chunk (default: {CHUNK})")
    add("--page-size", type=positive, default=32, metavar="N", help="number of positions per page")
    add("--rows", type=counts, metavar="N,N", help="numbers of input rows of linear layers (default: "
        "1,8,32,512, or 1,8 if the backend has no linear kernels)")  # fmt: skip
    add("--weights", type=weight_names, default="bf16,int8,w8a8,int4,w4a8", metavar="W,W",
        help="weight formats of the linear layers")  # fmt: skip
    add("--quick", action="store_true", help="measure native kernels on one thread by processor time, for "
        f"shared machines; takes a few seconds. Defaults become --contexts {_shown(QUICK_CONTEXTS)}, --chunk "
        f"{QUICK_CHUNK}, --rows {_shown(QUICK_ROWS)}; the machine's limits are not measured")  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.quick and args.threads not in (None, 1):
        raise InvalidConfig(
            f"--quick counts the processor time of one thread, not of {args.threads}; leave --threads out"
        )
    timing = QUICK if args.quick else Timing()
    try:
        choice = choose_backend(args.backend, 1 if args.quick else args.threads)
    except ValueError as error:
        raise InvalidConfig(str(error)) from error
    set_up_device()
    native = choice.backend.has_model_ops
    if args.quick and not native:
        raise InvalidConfig(
            f"--quick counts processor time, which says nothing of the {choice.backend.name} backend; "
            "use --backend cpu where native kernels are installed, or leave --quick out"
        )
    threads = native_instructions()[1] if native else 1
    roofline = None
    if not args.quick:
        roofline = measure_roofline(threads=threads, available=available_memory())
    rows = args.rows or (QUICK_ROWS if args.quick else ROWS if native else PLAIN_ROWS)
    chunk = args.chunk or (QUICK_CHUNK if args.quick else CHUNK)
    contexts = args.contexts or (QUICK_CONTEXTS if args.quick else CONTEXTS)
    grid = [(name, context) for context in contexts for name in args.formats]
    attention: list[AttentionTiming] = []
    refused: dict[str, str] = {}
    with tqdm(total=len(grid) + 1, unit="case", disable=None) as bar:
        for name, context in grid:
            try:
                attention += time_attention(
                    choice.backend,
                    name,
                    context=context,
                    chunk=chunk,
                    page_size=args.page_size,
                    timing=timing,
                )
            except ValueError as refusal:
                refused[name] = str(refusal)
            bar.update()
        linear = list(time_linear(rows, args.weights, native=native, timing=timing))
        bar.update()
    limits = "limits not measured"
    if roofline is not None:
        roofline = roofline.best_of(measure_roofline(threads=threads, available=available_memory()))
        limits = str(roofline)
    print(f"{choice.backend.name}: {choice.reason}\nmachine, {threads} threads: {limits}")
    for reason in refused.values():
        print(f"not measured: {reason}")
    result = {
        "bench": "kernels",
        "backend": choice.backend.name,
        "threads": threads,
        "page_size": args.page_size,
        "roofline": None if roofline is None else roofline.as_dict(),
        "attention": [_attention_row(timing, roofline) for timing in attention],
        "linear": [_linear_row(timing, roofline) for timing in linear],
    }
    _print_tables(result)
    return result


def _rates(timing: AttentionTiming | LinearTiming, roofline: Roofline | None) -> dict[str, float | None]:
    gb_s, gflop_s = timing.num_bytes / timing.seconds / 1e9, timing.flops / timing.seconds / 1e9
    fraction = None
    if roofline is not None:
        fraction = max(gb_s / roofline.dram_read_gb_s, gflop_s / roofline.matmul_gflop_s)
    return {"us": timing.seconds * 1e6, "gb_s": gb_s, "gflop_s": gflop_s, "fraction": fraction}


def _attention_row(timing: AttentionTiming, roofline: Roofline | None) -> dict[str, Any]:
    return {
        "kernel": timing.kernel,
        "k_format": timing.format,
        "v_format": timing.format,
        "context": timing.context,
        "sequences": timing.sequences,
        **_rates(timing, roofline),
    }


def _linear_row(timing: LinearTiming, roofline: Roofline | None) -> dict[str, Any]:
    return {"weights": timing.weights, "rows": timing.rows, **_rates(timing, roofline)}


def _print_tables(result: dict[str, Any]) -> None:
    print("one layer: 16 query heads, 8 KV heads, head_dim 128")
    print("kernel  pages  context  seqs        us    GB/s  GFLOP/s  of limit")
    for row in result["attention"]:
        print(
            f"{row['kernel']:7} {row['k_format']:5} {row['context']:8d} {row['sequences']:5d} {_figures(row)}"
        )
    print("linear layers of one block: hidden 1024, intermediate 3072")
    print("weights            rows              us    GB/s  GFLOP/s  of limit")
    for row in result["linear"]:
        print(f"{row['weights']:7} {row['rows']:14d} {'':5} {_figures(row)}")


def _figures(row: dict[str, Any]) -> str:
    of_limit = "" if row["fraction"] is None else f"{100 * row['fraction']:6.0f} %"
    return f"{row['us']:9.1f} {row['gb_s']:7.1f} {row['gflop_s']:8.1f} {of_limit}"
