"""Speed of the native linear layers on the shapes of a 0.6B model.

For each shape, kind of weight and number of rows: microseconds, GB/s of weights read and GFLOP/s.
Few rows are bound by memory: their weights cycle through more memory than a cache holds. The last
line is the same as JSON.

    python tests/bench/bench_linear.py [--threads N] [--rows 1,8,32,512] [--kinds bf16,q8,q4,mxfp4] [--exact]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import mlx.core as mx

from octavo.kernels import _ext

SHAPES = {
    "qkv": (4096, 1024),
    "o": (1024, 2048),
    "gate_up": (6144, 1024),
    "down": (1024, 3072),
    "lm_head": (151936, 1024),
}
CYCLED_BYTES = 800_000_000
MANY_ROWS = 64  # from here on one copy of the weights does: arithmetic is the bound
SECONDS = 0.3  # per measurement, at least


def pack(kind: str, outputs: int, inputs: int) -> _ext.PackedWeight:
    weight = (mx.random.normal((outputs, inputs)) * inputs**-0.5).astype(mx.bfloat16)
    if kind == "bf16":
        return _ext.pack_dense(weight)
    if kind in ("mxfp4", "nvfp4"):
        codes, scales, *_ = mx.quantize(weight, mode=kind)
        return _ext.pack_fp4(codes, scales, mode=kind)
    bits = int(kind[1:])
    return _ext.pack_affine(*mx.quantize(weight, 64, bits), group_size=64, bits=bits)


def best_seconds(run: Callable[[], None]) -> float:
    run()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def measure(weights: list[_ext.PackedWeight], rows: int, *, exact: bool) -> float:
    """Seconds of one multiplication, averaged over one round through ``weights``."""
    x = mx.random.normal((rows, weights[0].inputs)).astype(mx.bfloat16)
    mx.eval(x)

    def run() -> None:
        mx.eval([_ext.linear(x, weight, exact=exact) for weight in weights])

    return best_seconds(run) / len(weights)


def bench(shape: str, kind: str, all_rows: list[int], *, exact: bool) -> list[dict[str, object]]:
    outputs, inputs = SHAPES[shape]
    first = pack(kind, outputs, inputs)
    copies = -(-CYCLED_BYTES // first.nbytes) if min(all_rows) < MANY_ROWS else 1
    weights = [first] + [pack(kind, outputs, inputs) for _ in range(copies - 1)]
    results: list[dict[str, object]] = []
    for rows in all_rows:
        seconds = measure(weights if rows < MANY_ROWS else weights[:1], rows, exact=exact)
        gb_s, gflop_s = first.nbytes / seconds / 1e9, 2 * rows * outputs * inputs / seconds / 1e9
        figures = {"us": seconds * 1e6, "gb_s": gb_s, "gflop_s": gflop_s}
        results.append({"shape": shape, "kind": kind, "rows": rows} | figures)
        print(
            f"{shape:8} {kind:5} M={rows:<4} {seconds * 1e6:9.0f} us {gb_s:6.1f} GB/s {gflop_s:7.0f} GFLOP/s",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=_ext.threads())
    parser.add_argument("--rows", default="1,8,32,512")
    parser.add_argument("--kinds", default="bf16,q8,q4")
    parser.add_argument("--shapes", default="qkv,o,gate_up,down")
    parser.add_argument("--exact", action="store_true", help="keep activations as they are")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    _ext.set_threads(args.threads)
    limits = _ext.measure_roofline()
    print(f"{_ext.isa()}, {args.threads} threads; roofline {limits}")
    rows = [int(text) for text in args.rows.split(",")]
    results = [
        line
        for shape in args.shapes.split(",")
        for kind in args.kinds.split(",")
        for line in bench(shape, kind, rows, exact=args.exact)
    ]
    summary = {"bench": "linear", "isa": _ext.isa(), "threads": args.threads, "roofline": limits}
    print(json.dumps(summary | {"results": results}))


if __name__ == "__main__":
    main()
