from __future__ import annotations

import argparse
import time

from octavo.engine.api.config import EngineConfig
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.build import build_core
from octavo.engine.core.request import Request


class OctavoEngine:
    name = "octavo"

    def __init__(self, args: argparse.Namespace) -> None:
        tokens = args.sequences * args.context
        config = EngineConfig(
            model=args.model,
            weights=args.weights,
            kv_format=args.kv_format or "fp4",
            num_pages=tokens // 32 + args.sequences,
            max_running=args.sequences,
            max_step_tokens=args.step_tokens,
            prefix_cache=False,
            threads=args.threads,
            target_itl=args.target_itl,
        )
        self._core = build_core(config)
        info = self._core.info
        limits = f"{args.step_tokens} tokens a step, target {args.target_itl}"
        self.settings = f"{info.weights} weights, {info.kv_format} pages, {info.threads} threads, {limits}"
        self._requests: list[Request] = []
        self._count = 0
        self.latest: list[int] = []

    def submit(self, prompt: list[int], max_tokens: int) -> int:
        self._count += 1
        request = Request(
            str(self._count),
            prompt,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            max_tokens=max_tokens,
            tokenizer=self._core.tokenizer,
            vocab_size=self._core.info.vocab_size,
            arrived_at=time.monotonic(),
        )
        self._requests.append(request)
        self._core.add(request)
        return self._count

    def step(self) -> int:
        tokens, self.latest = 0, []
        for update in self._core.step():
            if update.delta.finish_reason is FinishReason.ERROR:
                raise RuntimeError(f"a request failed: {update.delta.error}")
            if new := len(update.delta.token_ids):
                self.latest.append(int(update.request.request_id))
            tokens += new
        return tokens

    def clear(self) -> None:
        for request in self._requests:
            self._core.abort(request)
        self._requests.clear()
        while self._core.has_work:
            self._core.step()

    @property
    def busy(self) -> bool:
        return self._core.has_work


def load(args: argparse.Namespace) -> OctavoEngine:
    return OctavoEngine(args)
