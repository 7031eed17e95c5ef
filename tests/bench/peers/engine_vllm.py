"""vLLM's engine on the CPU, in this process.

Compiled graphs need a C++ compiler; ``--eager`` computes without them."""

from __future__ import annotations

import argparse
import importlib
import os
from typing import Any

KV_BYTES_PER_TOKEN = 28 * 2 * 8 * 128 * 4  # Qwen3-0.6B in float32
GIB = 1024**3


class VllmEngine:
    name = "vllm"

    def __init__(self, args: argparse.Namespace) -> None:
        tokens = args.sequences * args.context
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(tokens * KV_BYTES_PER_TOKEN // GIB + 1)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{args.threads - 1}"
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # otherwise vLLM gives PyTorch one thread
        self._vllm: Any = importlib.import_module("vllm")
        engine_args = self._vllm.EngineArgs(
            model=args.model,
            dtype=args.dtype,
            max_model_len=args.context,
            max_num_seqs=args.sequences,
            max_num_batched_tokens=args.batched_tokens,
            enable_prefix_caching=False,
            enforce_eager=args.eager,
            disable_log_stats=True,
        )
        self._engine = self._vllm.LLMEngine.from_engine_args(engine_args)
        self._count = 0
        self._ids: list[str] = []
        self._seen: dict[str, int] = {}
        self.latest: list[int] = []
        how = "eager" if args.eager else "compiled"
        version, scheduling = self._vllm.__version__, self._engine.vllm_config.scheduler_config
        budget = f"{scheduling.max_num_batched_tokens} tokens a step"
        self.settings = f"{args.model}, {args.dtype}, {args.threads} threads, {how}, {budget}, {version}"

    def submit(self, prompt: list[int], max_tokens: int) -> int:
        self._count += 1
        params = self._vllm.SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, temperature=0.0, detokenize=False
        )
        self._ids.append(self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params))
        return self._count

    def step(self) -> int:
        tokens, self.latest = 0, []
        for output in self._engine.step():
            count = len(output.outputs[0].token_ids)
            if new := count - self._seen.get(output.request_id, 0):
                self.latest.append(int(output.request_id))
            tokens += new
            self._seen[output.request_id] = count
        return tokens

    def clear(self) -> None:
        self._engine.abort_request(self._ids, internal=True)
        while self.busy:
            self._engine.step()
        self._ids.clear()

    @property
    def busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())


def load(args: argparse.Namespace) -> VllmEngine:
    return VllmEngine(args)
