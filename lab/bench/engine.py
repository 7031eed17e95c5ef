"""``octavo bench engine``: prefill and decode rates of the engine without a server.

Prompts are random and the prefix cache is off. Decoding is timed while all requests of a batch decode.
Prefill and time to first token are medians over several single prompts.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
from dataclasses import replace
from typing import Any

import numpy as np
from tqdm import tqdm

from octavo.engine.api.config import EngineConfig
from octavo.engine.api.engine_info import EngineInfo
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.arguments.options import add_engine_arguments, given_settings
from octavo.engine.arguments.usage import counts, positive
from octavo.engine.core.build import build_core
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.memory.budget import available_memory, format_size
from octavo.kernels.backends import native_instructions

from ..kernels.roofline import Roofline, measure_roofline
from .drive import Timing, Workload, serve
from .work import ModelWork, model_work

ALONE_RUNS = 3
SEED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument(
        "--batch", type=counts, default="1,8,32", metavar="N,N", help="numbers of sequences in a batch"
    )
    parser.add_argument(
        "--prompt-tokens", type=positive, default=512, metavar="N", help="number of tokens of each prompt"
    )
    parser.add_argument("--output-tokens", type=positive, default=64, metavar="N",
        help="number of timed output tokens per sequence")  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, Any]:
    load = Workload(args.batch, args.prompt_tokens, args.output_tokens)
    config = _config(given_settings(args), load)
    core = build_core(config)
    try:
        info = core.info
        _check_fits(config, load, info)
        alone, timings = _measure(core, config, load)
    finally:
        core.close()
    peak_rss = _peak_rss_bytes()
    roofline = measure_roofline(threads=info.threads, available=available_memory())
    work = model_work(info.path, info.memory.weights - info.memory.unread)
    kv_token_bytes = (info.memory.pages - info.memory.residual) / (info.num_pages * info.page_size)
    ttft = statistics.median(timing.ttft_s for timing in alone)
    result = {
        "bench": "engine",
        "model": info.name,
        "backend": info.backend,
        "threads": info.threads,
        "kv_format": info.kv_format,
        "weights": info.weights,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
        "prefill_tokens_per_s": load.prompt_tokens / ttft,
        "ttft_s": ttft,
        "decode_tokens_per_s": {str(n): timing.decoding.tokens_per_s for n, timing in timings.items()},
        "decode_step_ms": {str(n): timing.decoding.parts.as_dict() for n, timing in timings.items()},
        "peak_rss_bytes": peak_rss,
        "kv_bytes": info.memory.pages,
        "isa": native_instructions()[0] if info.backend == "cpu" else None,
        "roofline": roofline.as_dict(),
        **_of_limits(roofline, work, load, ttft, timings, kv_token_bytes),
    }
    _print_table(info, load, result, timings, roofline)
    return result


def _config(settings: dict[str, Any], load: Workload) -> EngineConfig:
    largest = load.batches[-1]
    config = EngineConfig(
        **{"prefix_cache": False, "max_running": largest, "max_step_tokens": max(512, largest), **settings}
    )
    if config.num_pages is not None or config.kv_memory is not None:
        return config
    pages = -(-(load.prompt_tokens + load.max_tokens(largest, config.max_step_tokens)) // config.page_size)
    return replace(config, num_pages=largest * (pages + 1))


def _check_fits(config: EngineConfig, load: Workload, info: EngineInfo) -> None:
    largest = load.batches[-1]
    if largest > config.max_running:
        raise InvalidConfig(
            f"batch {largest} exceeds max_running {config.max_running}; raise max_running or lower --batch"
        )
    tokens = load.prompt_tokens + load.max_tokens(largest, config.max_step_tokens)
    room = min(info.max_model_len, info.num_pages * info.page_size // largest)
    if tokens > room:
        raise InvalidConfig(
            f"{largest} sequences of up to {tokens} tokens do not fit: only {room} tokens each fit; use "
            "shorter prompts or outputs, smaller batches, or more KV memory"
        )


def _measure(
    core: EngineCore, config: EngineConfig, load: Workload
) -> tuple[list[Timing], dict[int, Timing]]:
    rng = np.random.default_rng(SEED)
    runs = [1] * ALONE_RUNS + [batch for batch in load.batches if batch != 1]
    timings: dict[int, list[Timing]] = {}
    with tqdm(total=len(runs) + 1, unit="run", disable=None) as bar:
        serve(core, config, Workload((1,), min(16, load.prompt_tokens), 4), 1, rng)
        bar.update()
        for batch in runs:
            timings.setdefault(batch, []).append(serve(core, config, load, batch, rng))
            bar.update()
    fastest = {
        batch: max(timings[batch], key=lambda timing: timing.decoding.tokens_per_s) for batch in load.batches
    }
    return timings[1], fastest


def _of_limits(
    roofline: Roofline,
    work: ModelWork | None,
    load: Workload,
    ttft_s: float,
    timings: dict[int, Timing],
    kv_token_bytes: float,
) -> dict[str, Any]:
    if work is None:
        return {"prefill_of_limit": None, "decode_of_limit": None}
    flops = 2 * work.linear_parameters * load.prompt_tokens / ttft_s
    decode = {}
    for batch, timing in timings.items():
        step_s = timing.decoding.seconds / timing.decoding.steps
        num_bytes = work.streamed_bytes + batch * timing.decoding.context * kv_token_bytes
        decode[str(batch)] = num_bytes / step_s / 1e9 / roofline.dram_read_gb_s
    return {"prefill_of_limit": flops / 1e9 / roofline.matmul_gflop_s, "decode_of_limit": decode}


def _print_table(
    info: EngineInfo, load: Workload, result: dict[str, Any], timings: dict[int, Timing], roofline: Roofline
) -> None:
    print(
        f"{info.name}: {info.weights} weights ({format_size(info.memory.weights)}), {info.kv_format} pages "
        f"({format_size(info.memory.pages)}), backend {info.backend}, {info.threads} threads"
    )
    print(f"machine: {roofline}")
    print(
        f"prefill: {load.prompt_tokens} tokens in {result['ttft_s']:.3f} s, "
        f"{result['prefill_tokens_per_s']:.0f} tokens/s{_percent(result['prefill_of_limit'], 'matmul')}"
    )
    print("decode:  batch  tokens/s  ms/step")
    for batch, timing in timings.items():
        decoding = timing.decoding
        share = result["decode_of_limit"] and result["decode_of_limit"][str(batch)]
        step_ms = decoding.seconds / decoding.steps * 1e3
        print(f"        {batch:6d} {decoding.tokens_per_s:9.1f} {step_ms:8.2f}{_percent(share, 'DRAM read')}")
    for batch, timing in timings.items():
        parts = timing.decoding.parts
        if parts.kernels is not None and parts.overhead is not None:
            around = ", ".join(f"{name} {ms:.2f}" for name, ms in parts.as_dict().items() if ms is not None)
            share = 100 * parts.overhead / (parts.kernels + parts.overhead)
            print(f"a step of {batch}, in ms: {around} ({share:.1f} % beside kernels)")
    print(f"peak resident memory: {format_size(result['peak_rss_bytes'])}")


def _percent(fraction: float | None, of: str) -> str:
    return "" if fraction is None else f"  ({100 * fraction:.0f} % of {of})"


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
