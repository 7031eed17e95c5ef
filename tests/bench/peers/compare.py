"""Measure the speed of one engine on the workload in workload.py; the last line is JSON.

    python tests/bench/peers/compare.py octavo --model q06-4
    python tests/bench/peers/compare.py openvino --model ov-int4 --tokenizer ov-int4
    python tests/bench/peers/compare.py llama.cpp --model q06-Q4_0.gguf

README.md in this folder says how to make environments and models. Nothing else may run on the machine."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys

from workload import Figures, Work, measure

ENGINES = {"octavo": "octavo", "openvino": "openvino_genai", "llama.cpp": "llama_cpp", "vllm": "vllm"}


def numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(word) for word in text.split(",") if word))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("engine", choices=ENGINES)
    add("--model", required=True, help="folder or file, in the engine's format")
    add("--tokenizer", help="folder, where the model's has none")
    add("--kv-format", help="of the KV cache, by the engine's name (octavo: fp4, others: their default)")
    add("--weights", default="keep", help="that octavo loads them as: keep, int8, w8a8, int4, w4a8")
    add("--dtype", default="bfloat16", help="that vllm computes in")
    add("--property", action="append", default=[], metavar="NAME=VALUE", help="of openvino's CPU plug-in")
    add("--eager", action="store_true", help="vllm: without compiled graphs")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--step-tokens", type=int, default=512, help="tokens computed in one step")
    add("--prompt-tokens", type=int, default=512, help="before decoding; 0: no prefill figure")
    add("--batch", type=numbers, default=(1, 8), metavar="N,N", help="sequences that decode")
    add("--steps", type=int, default=32, help="decode steps timed")
    add("--requests", type=int, default=32, help="served at once; 0: none")
    add("--request-prompt-tokens", type=int, default=256)
    add("--request-output-tokens", type=int, default=64)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    package = ENGINES[args.engine]
    if importlib.util.find_spec(package) is None:
        print(f"skipped: {args.engine} needs the package {package}, which {sys.executable} does not have")
        return
    work = Work(
        args.prompt_tokens,
        args.batch,
        args.steps,
        args.requests,
        args.request_prompt_tokens,
        args.request_output_tokens,
    )
    largest = max((*args.batch, args.requests, 1))
    args.sequences = largest
    decoding = args.prompt_tokens + 2 * max((*args.batch, 0)) + args.steps + 64
    args.context = max(decoding, args.request_prompt_tokens + args.request_output_tokens + 32)
    args.batched_tokens = max(args.step_tokens, args.context)  # vLLM's token budget, which fits any prompt
    args.target_itl = "off"
    engine = importlib.import_module(f"engine_{args.engine.replace('.', '_')}").load(args)
    figures = measure(engine, work)
    print_table(engine.name, engine.settings, figures)
    print(
        json.dumps(
            {"bench": "peers", "engine": engine.name, "settings": engine.settings, **figures.as_dict()}
        )
    )


def print_table(name: str, settings: str, figures: Figures) -> None:
    print(f"{name}: {settings}")
    rows = {"prefill": figures.prefill}
    rows |= {f"decode, {batch} sequences": rate for batch, rate in figures.decode.items()}
    rows |= {"decode, all requests at once": figures.full_batch, "serve, output": figures.serve}
    for what, rate in rows.items():
        if rate is not None:
            print(f"  {what:30} {rate:8.1f} tokens/s")


if __name__ == "__main__":
    main()
