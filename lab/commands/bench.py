"""``octavo bench``: benchmarks with a table and, with --json, one line of JSON."""

from __future__ import annotations

import argparse
import functools
import importlib

from octavo.engine.arguments.options import add_json_argument, print_json

BENCHES = {
    "engine": "measure prefill and decode rates of the engine, without a server",
    "serve": "measure latencies and rates of a server over gRPC",
    "kernels": "compare the speed of each kernel with the limits of this machine",
    "prefix": "measure how the prefix cache shortens the time to first token",
    "route": "compare routing policies of the router on a recorded trace",
    "quality": "measure the loss in quality and the memory of each page format",
    "speculate": "measure tokens per second with and without drafts, by kind of text",
    "invariance": "check that a request's output has the same bits however it is served",
    "schedule": "simulate waiting times under each order of admission",
    "machines": "estimate what several machines send, and the load of a router",
    "scheduler": "measure the time per step of the control plane, without a model",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    for name, text in BENCHES.items():
        description = f"{text[0].upper()}{text[1:]}."
        benches.add_parser(name, help=text, description=description, fill=functools.partial(_fill, name))


def _fill(name: str, parser: argparse.ArgumentParser) -> None:
    bench = importlib.import_module(f"octavo_lab.bench.{name}")
    bench.add_arguments(parser)
    add_json_argument(parser)
    parser.set_defaults(run_bench=bench.run, exit_code_of=getattr(bench, "exit_code", None))


def run(args: argparse.Namespace) -> int:
    result = args.run_bench(args)
    if args.json:
        print_json(result)
    code: int = 0 if args.exit_code_of is None else args.exit_code_of(result)
    return code
