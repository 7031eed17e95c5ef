"""OpenVINO GenAI's continuous batching pipeline, on the CPU.

Models are folders from optimum-intel. By default the KV cache is u8 and activations are quantized."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

BLOCK = 32  # positions of an OpenVINO KV block


class OpenVinoEngine:
    name = "openvino"

    def __init__(self, args: argparse.Namespace) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
        scheduler = self._genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = args.step_tokens
        scheduler.max_num_seqs = args.sequences
        scheduler.num_kv_blocks = args.sequences * (args.context // BLOCK + 1)
        scheduler.enable_prefix_caching = False
        properties = dict(setting.split("=", 1) for setting in args.property)
        properties["INFERENCE_NUM_THREADS"] = args.threads
        if args.kv_format:
            properties["KV_CACHE_PRECISION"] = args.kv_format
        tokenizer = self._genai.Tokenizer(args.tokenizer or args.model)
        self._pipeline = self._genai.ContinuousBatchingPipeline(
            args.model, tokenizer, scheduler, "CPU", **properties
        )
        version = self._openvino.__version__
        self.settings = f"{args.model}, {args.kv_format or 'default'} KV, {args.threads} threads, {version}"
        self._handles: dict[int, Any] = {}
        self._count = 0

    def submit(self, prompt: list[int], max_tokens: int) -> None:
        import numpy as np

        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._count += 1
        ids = self._openvino.Tensor(np.array([prompt], np.int64))
        self._handles[self._count] = self._pipeline.add_request(self._count, ids, config)

    def step(self) -> int:
        if not self._pipeline.has_non_finished_requests():
            return 0
        self._pipeline.step()
        tokens = 0
        for handle in self._handles.values():
            while handle.can_read():
                tokens += sum(len(output.generated_ids) for output in handle.read().values())
        return tokens

    def clear(self) -> None:
        for handle in self._handles.values():
            handle.stop()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        self._handles.clear()

    @property
    def busy(self) -> bool:
        return bool(self._pipeline.has_non_finished_requests())


def load(args: argparse.Namespace) -> OpenVinoEngine:
    return OpenVinoEngine(args)
