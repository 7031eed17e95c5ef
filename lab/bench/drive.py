from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import RequestFailed
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.core.request import Request
from octavo.engine.structured_output.constraint import Constraint

from .phases import Phases, StepParts


@dataclass(frozen=True, slots=True)
class Workload:
    batches: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int

    def max_tokens(self, batch: int, max_step_tokens: int) -> int:
        prefill_steps = -(-batch * self.prompt_tokens // max(1, max_step_tokens - batch)) + batch
        return self.output_tokens + prefill_steps


@dataclass(frozen=True, slots=True)
class Decoding:
    """Decode steps that generated ``tokens`` in ``seconds``; ``context`` is the mean sequence length."""

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
    """Times of one batch; ``ttft_s`` is the time until every request has its first token."""

    ttft_s: float
    decoding: Decoding


def serve(
    core: EngineCore, config: EngineConfig, load: Workload, batch: int, rng: np.random.Generator
) -> Timing:
    """Serve ``batch`` prompts until each has decoded ``output_tokens`` together with all others."""
    vocab_size = core.info.vocab_size
    params = SamplingParams(max_tokens=load.max_tokens(batch, config.max_step_tokens), ignore_eos=True)
    requests = []
    for index in range(batch):
        prompt = rng.integers(0, vocab_size, load.prompt_tokens).tolist()
        requests.append(request_of(core, prompt, params, request_id=f"{batch}/{index}"))
    began = time.perf_counter()
    for request in requests:
        core.add(request)
    started: set[Request] = set()
    generated = 0
    while len(started) < batch:
        fresh = step_of(core)
        started.update(request for request, _ in fresh)
        generated += len(fresh)
    first_at = time.perf_counter()
    with Phases(core) as phases:
        tokens = sum(len(step_of(core)) for _ in range(load.output_tokens))
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


def request_of(
    core: EngineCore,
    prompt: list[int],
    params: SamplingParams,
    *,
    request_id: str = "bench",
    salt: bytes = b"",
    constraint: Constraint | None = None,
) -> Request:
    assert params.max_tokens is not None
    return Request(
        request_id,
        prompt,
        params,
        max_tokens=params.max_tokens,
        tokenizer=core.tokenizer,
        vocab_size=core.info.vocab_size,
        arrived_at=time.monotonic(),
        salt=salt,
        constraint=constraint,
    )


def step_of(core: EngineCore) -> list[tuple[Request, Sequence[int]]]:
    """Compute a step; return each request that got tokens, with its tokens. Raises RequestFailed."""
    updates = core.step()
    for update in updates:
        if update.delta.finish_reason is FinishReason.ERROR:
            raise RequestFailed(f"the benchmark's request failed: {update.delta.error}")
    return [(update.request, update.delta.token_ids) for update in updates if update.delta.token_ids]
