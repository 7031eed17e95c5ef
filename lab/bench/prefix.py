"""``octavo bench prefix``: effects of the prefix cache on a real model.

- time to first token of a prompt with a new prefix (cold) and with a cached one (warm), by length
- hit ratio and time to first token of conversations, by pool size and without the cache
- hit ratio if each conversation has a different cache salt
- the cost of the cache if no request hits
- for recurrent layers, hits by snapshot policy and number of snapshots
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from octavo.engine.api.config import EngineConfig
from octavo.engine.api.engine_info import EngineInfo
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.arguments.options import add_engine_arguments, given_settings
from octavo.engine.arguments.usage import counts, positive
from octavo.engine.executor.load import load_runner
from octavo.engine.tokenizer.tokenizer import load_tokenizer

from ..plots.figure import require_matplotlib
from ..plots.prefix import plot
from .prefix_cost import cost_without_reuse
from .prefix_runs import (
    ANSWER_TOKENS,
    SUFFIX_TOKENS,
    Bench,
    Chats,
    converse,
    pool_sizes,
    warm_against_cold,
)
from .prefix_states import by_snapshots, trials

COST_TOKENS, COST_ROUNDS = 64, 10
EXPERIMENTS = ("ttft", "pools", "salts", "cost", "states")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    add = parser.add_argument
    add("--only", choices=EXPERIMENTS, action="append", help="experiment to run; repeatable (default: all)")
    add("--prefix-tokens", type=counts, default="256,512,1024,2048,4096,8192", metavar="N,N",
        help="lengths of the shared prefix in tokens, up to the model's limit")  # fmt: skip
    add("--runs", type=positive, default=3, metavar="N", help="number of times that each measurement is "
        "repeated")  # fmt: skip
    add("--plot", type=Path, metavar="F.png", help="image file for a plot of the results (needs matplotlib)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    require_matplotlib(args.plot)
    config = _config(given_settings(args), args.prefix_tokens, Chats())
    runner = load_runner(config)
    try:
        wanted = _fitting(runner.info, args.only)
        bench = Bench(config, runner, load_tokenizer(runner.info.path))
        result = _measure(bench, wanted, args.prefix_tokens, args.runs)
    finally:
        runner.close()
    _print_tables(result)
    if args.plot is not None:
        plot(result, args.plot)
    return result


def _fitting(info: EngineInfo, only: list[str] | None) -> tuple[str, ...]:
    if info.states is not None:
        turns = "its three engines take steps in turn, and a slot of recurrent state stands where one left it"
        unfit = {"cost": turns}
    else:
        unfit = {"states": f"it is about recurrent layers, and {info.name} has none"}
    for name in only or ():
        if name in unfit:
            raise InvalidConfig(f"--only {name} does not fit this model: {unfit[name]}; drop it")
    return tuple(name for name in only or EXPERIMENTS if name not in unfit)


def _config(settings: dict[str, Any], lengths: tuple[int, ...], chats: Chats) -> EngineConfig:
    config = EngineConfig(**settings)
    if not config.prefix_cache or config.cache_dir is not None:
        raise InvalidConfig("bench prefix switches the cache itself; drop --no-prefix-cache and --cache-dir")
    if config.num_pages is not None or config.kv_memory is not None:
        return config
    pages = 2 * (-(-(max(lengths) + SUFFIX_TOKENS + ANSWER_TOKENS) // config.page_size) + 1)
    return replace(config, num_pages=max(pages, chats.pages(config.page_size) + 1))


def _measure(bench: Bench, wanted: tuple[str, ...], lengths: tuple[int, ...], runs: int) -> dict[str, Any]:
    info = bench.info
    room = min(info.max_model_len, info.num_pages * info.page_size) - SUFFIX_TOKENS - ANSWER_TOKENS
    fitting = [length for length in lengths if length <= room]
    result: dict[str, Any] = {
        "bench": "prefix",
        "model": info.name,
        "backend": info.backend,
        "kv_format": info.kv_format,
        "page_size": info.page_size,
        "left_out": [length for length in lengths if length > room and "ttft" in wanted],
    }
    chats = Chats()
    pages = chats.pages(info.page_size)
    sizes = list(pool_sizes(pages, -(-chats.longest // info.page_size)))
    steps = len(fitting) * ("ttft" in wanted) + 2 * ("cost" in wanted)
    snapshots = list(trials(info.states, chats)) if "states" in wanted and info.states is not None else []
    workloads = len(snapshots) + (len(sizes) + 1) * ("pools" in wanted) + 2 * ("salts" in wanted)
    steps += chats.conversations * chats.turns * workloads
    with tqdm(total=steps, unit="run", disable=None, file=sys.stderr) as bar:
        bench.serve(bench.core(), bench.tokens(min(64, room)))
        if "ttft" in wanted:
            result["ttft"] = []
            for length in fitting:
                result["ttft"].append(warm_against_cold(bench, length, runs))
                bar.update()
        if "pools" in wanted:
            result["pools"] = [converse(bench, chats, size, done=bar.update).to_json() for size in sizes]
            off = converse(bench, chats, pages, prefix_cache=False, done=bar.update)
            result["cache_off"] = off.to_json()
        if "salts" in wanted:
            result["salts"] = {
                name: converse(bench, chats, pages + 1, salts=salts, done=bar.update).to_json()
                for name, salts in (("shared", False), ("per_conversation", True))
            }
        if "cost" in wanted:
            result["cost"] = cost_without_reuse(
                bench, prompt_tokens=min(COST_TOKENS, room), rounds=COST_ROUNDS * runs
            )
            bar.update(2)
        if snapshots:
            result["states"] = by_snapshots(bench, chats, pages + 1, snapshots, bar.update)
    return result


def _print_tables(result: dict[str, Any]) -> None:
    print(f"{result['model']}: {result['kv_format']} pages, {result['backend']} backend")
    if result["left_out"]:
        lengths = ", ".join(map(str, result["left_out"]))
        print(f"left out, longer than the model or the pool: {lengths} tokens")
    for row in result.get("ttft", ()):
        print(
            f"shared prefix {row['prefix_tokens']:>6} tokens: cold {1000 * row['cold_s']:>9.1f} ms, "
            f"warm {1000 * row['warm_s']:>8.1f} ms, 1/{1 / row['warm_share']:.1f}"
        )
    named = [(f"pool of {row['num_pages']:>4} pages", row) for row in result.get("pools", ())]
    named += [("without the cache", result["cache_off"])] if "cache_off" in result else []
    named += [(f"salts {name}", row) for name, row in result.get("salts", {}).items()]
    for name, row in named:
        print(
            f"conversations, {name:24}: {100 * row['hit_ratio']:>5.1f} % of tokens found, later turns start "
            f"after {1000 * row['ttft_s']:.1f} ms"
        )
    for row in result.get("states", ()):
        print(
            f"snapshots {row['snapshots']:24} room for {row['num_snapshots']:>3} "
            f"({row['snapshot_bytes'] / 2**20:>8.2f} MiB): {100 * row['hit_ratio']:>5.1f} % of tokens found, "
            f"later turns start after {1000 * row['ttft_s']:.1f} ms"
        )
    if "cost" in result:
        cost, control = result["cost"], result["cost"]["control"]
        low, high = cost["cost_interval"]
        print(
            f"nothing shared: {100 * cost['cost']:+.2f} % of time with the cache, 90 % sure of "
            f"{100 * low:+.2f} to {100 * high:+.2f} ({cost['rounds']} pairs); without it against itself "
            f"{100 * control['median']:+.2f}, {100 * control['low']:+.2f} to {100 * control['high']:+.2f}"
        )
