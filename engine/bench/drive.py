"""Driving an engine core step by step with random prompts, for benchmarks."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ..api.config import EngineConfig
from ..api.errors import RequestFailed
from ..api.outputs import FinishReason
from ..api.sampling_params import SamplingParams
from ..core.engine_core import EngineCore
from ..core.request import Request
from .phases import Phases, StepParts


@dataclass(frozen=True, slots=True)
class Workload:
    """``batches`` in ascending order."""

    batches: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int

    def max_tokens(self, batch: int, max_step_tokens: int) -> int:
        """Tokens a sequence may generate: it decodes while the later prompts are computed."""
        prefill_steps = -(-batch * self.prompt_tokens // max(1, max_step_tokens - batch)) + batch
        return self.output_tokens + prefill_steps


@dataclass(frozen=True, slots=True)
class Decoding:
    """``tokens`` came in ``steps`` steps that took ``seconds``, by sequences of ``context`` tokens."""

    tokens: int
    steps: int
    seconds: float
    context: float
    parts: StepParts

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Timing:
    ttft_s: float
    decoding: Decoding


def serve(
    core: EngineCore, config: EngineConfig, load: Workload, batch: int, rng: np.random.Generator
) -> Timing:
    """Serve ``batch`` prompts until each has decoded ``output_tokens`` beside all the others."""
    vocab_size = core.info.vocab_size
    requests = []
    for index in range(batch):
        prompt = rng.integers(0, vocab_size, load.prompt_tokens).tolist()
        requests.append(
            _request(core, f"{batch}/{index}", prompt, load.max_tokens(batch, config.max_step_tokens))
        )
    began = time.perf_counter()
    for request in requests:
        core.add(request)
    started: set[Request] = set()
    generated = 0
    while len(started) < batch:
        fresh = _step(core)
        started.update(fresh)
        generated += len(fresh)
    first_at = time.perf_counter()
    with Phases(core) as phases:
        tokens = sum(len(_step(core)) for _ in range(load.output_tokens))
    seconds = time.perf_counter() - first_at
    for request in requests:
        core.abort(request)
    while core.has_work:
        core.step()
    context = load.prompt_tokens + generated / batch + load.output_tokens / 2
    return Timing(
        first_at - began,
        Decoding(tokens, load.output_tokens, seconds, context, phases.parts(load.output_tokens)),
    )


def _request(core: EngineCore, request_id: str, prompt: list[int], max_tokens: int) -> Request:
    return Request(
        request_id,
        prompt,
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        max_tokens=max_tokens,
        tokenizer=core.tokenizer,
        vocab_size=core.info.vocab_size,
        arrived_at=time.monotonic(),
    )


def _step(core: EngineCore) -> list[Request]:
    """One step; the requests that got a token. Raises RequestFailed if any failed."""
    advanced = []
    for update in core.step():
        if update.delta.finish_reason is FinishReason.ERROR:
            raise RequestFailed(f"the benchmark's request failed: {update.delta.error}")
        if update.delta.token_ids:
            advanced.append(update.request)
    return advanced
