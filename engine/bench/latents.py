"""``octavo bench latents``: attention over latents (MLA) against the machine's measured limits, and against
gathering them first. One thread is timed by processor time, which other programs of the machine disturb less.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any, get_args

from octavo.kernels.backends import BackendName, choose_backend, native_instructions, set_up_device
from octavo.kernels.bench.latent_timings import LATENT, ROTARY, LatentTiming, time_latents
from octavo.kernels.bench.roofline import measure_roofline

from ..api.errors import InvalidConfig
from ..arguments.usage import counts, positive
from ..memory.budget import available_memory
from .arguments import format_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", choices=get_args(BackendName), default="auto", help="where kernels run")
    add(
        "--threads",
        type=positive,
        metavar="N",
        help="CPU threads (all this process may use); 1: by processor time",
    )
    add("--heads", type=counts, default="16,32,64,128", metavar="N,N", help="query heads (%(default)s)")
    add(
        "--contexts", type=counts, default="4096", metavar="N,N", help="positions of a sequence (%(default)s)"
    )
    add("--formats", type=format_names, default="bf16,int8", metavar="F,F", help="of latents (%(default)s)")
    add("--chunk", type=positive, default=64, metavar="N", help="rows of a prompt chunk (%(default)s)")
    add("--page-size", type=positive, default=32, metavar="N", help="positions per page (%(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, return what --json prints."""
    try:
        choice = choose_backend(args.backend, args.threads)
    except ValueError as error:
        raise InvalidConfig(str(error)) from error
    set_up_device()
    threads = native_instructions()[1] if choice.backend.has_model_ops else 1
    clock = time.process_time if threads == 1 and choice.backend.has_model_ops else time.perf_counter
    roofline = measure_roofline(threads=threads, available=available_memory(), clock=clock)
    timings: list[LatentTiming] = []
    try:
        for context in args.contexts:
            for heads in args.heads:
                for name in args.formats:
                    timings += time_latents(
                        choice.backend,
                        name,
                        heads=heads,
                        context=context,
                        chunk=args.chunk,
                        page_size=args.page_size,
                        clock=clock,
                    )
    except ValueError as error:
        raise InvalidConfig(f"not measured: {error}") from error
    roofline = roofline.best_of(measure_roofline(threads=threads, available=available_memory(), clock=clock))
    print(f"{choice.backend.name}: {choice.reason}\nmachine, {threads} threads: {roofline}")
    print(f"one layer: latents of {LATENT}, rotary keys of {ROTARY}")
    print(
        "kernel    latents  heads  context  seqs         us    GB/s  GFLOP/s  reads  products  gathered takes"
    )
    gathered = {_case(timing): timing for timing in timings if timing.kernel == "gathered"}
    rows = []
    for timing in timings:
        gb_s = timing.num_bytes / timing.seconds / 1e9
        gflop_s = timing.flops / timing.seconds / 1e9
        row = asdict(timing) | {
            "of_reads": gb_s / roofline.dram_read_gb_s,
            "of_products": gflop_s / roofline.matmul_gflop_s,
            "gathered_takes": gathered[_case(timing)].seconds * timing.sequences / timing.seconds
            if timing.kernel == "decode"
            else None,
        }
        rows.append(row)
        times = "" if row["gathered_takes"] is None else f"{row['gathered_takes']:8.1f} times"
        case = (
            f"{timing.kernel:9} {timing.format:7} {timing.heads:6d} {timing.context:8d} {timing.sequences:5d}"
        )
        print(
            f"{case} {timing.seconds * 1e6:10.1f} {gb_s:7.2f} {gflop_s:8.1f} "
            f"{100 * row['of_reads']:4.0f} % {100 * row['of_products']:7.0f} % {times}".rstrip()
        )
    return {
        "bench": "latents",
        "backend": choice.backend.name,
        "threads": threads,
        "page_size": args.page_size,
        "roofline": roofline.as_dict(),
        "attention": rows,
    }


def _case(timing: LatentTiming) -> tuple[str, int, int]:
    return timing.format, timing.heads, timing.context
