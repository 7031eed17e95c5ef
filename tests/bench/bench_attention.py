"""Speed of the native attention kernels by page formats, context and threads.

    python tests/bench/bench_attention.py [--heads 8] [--group 2] [--dim 128] [--page-size 32]

Decode reads every position once per KV head: nanoseconds per position (all heads) and GB/s of page
bytes. Chunk computes causal attention of new rows over a context: GFLOP/s. Pages lie in random
order, and calls cycle over enough sequences to leave the caches. The best of several runs counts.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from octavo.kernels import _ext, page_format
from octavo.kernels.cpu.backend import CpuPool
from octavo.kernels.formats import format_pair
from octavo.kernels.interface import AttendOptions, LayerSpec, PoolSpec
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata


def build_step(tables: np.ndarray, context: int, rows: int, page_size: int) -> AttentionMetadata:
    """The last ``rows`` positions of each sequence, ``context`` positions long."""
    positions = np.arange(context - rows, context, dtype=np.int32)
    slots = tables[:, positions // page_size] * page_size + positions % page_size
    count = len(tables)
    return AttentionMetadata(
        positions=np.tile(positions, count),
        q_start=np.arange(0, (count + 1) * rows, rows, dtype=np.int32),
        kv_len=np.full(count, context, np.int32),
        groups=(
            GroupMetadata(slots=slots.ravel().astype(np.int32), page_table=np.ascontiguousarray(tables)),
        ),
        page_size=page_size,
    )


def best_seconds(run: Callable[[], object], budget: float) -> float:
    run()
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < budget:
        before = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - before)
    return best


def fill(pool: CpuPool, args: argparse.Namespace, rng: np.random.Generator) -> None:
    """Random rows in every slot."""
    shape = (args.page_size * 64, args.heads, args.dim)
    rows = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(mx.bfloat16)
    pages = np.arange(pool.spec.num_pages, dtype=np.int32)
    for first in range(0, len(pages), 64):
        table = pages[None, first : first + 64]
        count = table.shape[1] * args.page_size
        pool.begin_step(build_step(table, count, count, args.page_size))
        pool.write(0, rows[:count], rows[:count])
        mx.eval(pool.pending())


def attend_seconds(
    pool: CpuPool, args: argparse.Namespace, rng: np.random.Generator, *, context: int, rows: int, count: int
) -> float:
    """Seconds of one call for ``count`` sequences with ``rows`` rows each."""
    per, pages = context // args.page_size, rng.permutation(pool.spec.num_pages).astype(np.int32)
    groups = [
        pages[i : i + count * per].reshape(count, per)
        for i in range(0, len(pages) - count * per + 1, count * per)
    ]
    shape = (count * rows, args.heads * args.group, args.dim)
    queries = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(mx.bfloat16)
    mx.eval(queries)

    def run() -> None:
        outs = []
        for tables in groups:
            pool.begin_step(build_step(tables, context, rows, args.page_size))
            outs.append(pool.attend(0, queries, AttendOptions(scale=args.dim**-0.5)))
        mx.eval(outs)

    return best_seconds(run, args.seconds) / len(groups)


def bench_format(name: str, args: argparse.Namespace) -> dict[str, float]:
    layer = LayerSpec(num_kv_heads=args.heads, head_dim=args.dim, value_dim=args.dim)
    pair = format_pair(name)
    spec = PoolSpec(
        layers=(layer,),
        num_pages=args.positions // args.page_size,
        page_size=args.page_size,
        k_format=pair.k,
        v_format=pair.v,
    )
    rng, pool, results = np.random.default_rng(0), CpuPool(spec, exact=args.exact), {}
    fill(pool, args, rng)
    position_bytes = args.heads * sum(page_format(each).row_bytes(args.dim) for each in (pair.k, pair.v))
    for threads in args.threads:
        _ext.set_threads(threads)
        for context, count in ((512, 8), (4096, 2), (32768, 1)):
            seconds = attend_seconds(pool, args, rng, context=context, rows=1, count=count)
            nanoseconds = seconds / (context * count) * 1e9
            results[f"decode/{context}/{threads}"] = nanoseconds
            rate = position_bytes / nanoseconds
            print(f"{name} threads={threads} decode context={context}: {nanoseconds:.1f} ns, {rate:.1f} GB/s")
        for rows, context in ((512, 512), (512, 4096), (32, 4096)):
            seconds = attend_seconds(pool, args, rng, context=context, rows=rows, count=1)
            pairs = rows * (context - rows) + rows * (rows + 1) / 2
            rate = 4 * pairs * args.dim * args.heads * args.group / seconds / 1e9
            results[f"chunk/{rows}/{context}/{threads}"] = rate
            print(f"{name} threads={threads} chunk {rows} rows context={context}: {rate:.0f} GFLOP/s")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--formats", default="bf16,fp16,fp4,fp5/fp4", help="of both or K/V")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--positions", type=int, default=131072, help="positions in the pool")
    parser.add_argument("--threads", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2])
    parser.add_argument("--seconds", type=float, default=0.5, help="time per measurement")
    parser.add_argument("--exact", action="store_true", help="no products of bytes")
    args = parser.parse_args()
    results = {name: bench_format(name, args) for name in args.formats.split(",")}
    if {"bf16", "fp4"} <= set(results):
        for key, value in results["fp4"].items():
            ratio = results["bf16"][key] / value if key.startswith("decode") else value / results["bf16"][key]
            print(f"fp4 against bf16, {key}: {ratio:.2f}x")
    print(json.dumps({"bench": "attention", "isa": _ext.isa(), "results": results}))


if __name__ == "__main__":
    main()
