"""Workload of the benchmark, and the loop that drives each engine through it.

Weights and prompts are random, sampling is greedy, end tokens are ignored, and no prefix is cached.
So every engine computes the same number of tokens. Loading is not timed."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Protocol

PREFILL_RUNS = 3
VOCABULARY = 151936

Alone = Callable[[], AbstractContextManager[None]]


class Engine(Protocol):
    name: str
    settings: str  # weights, KV format and other settings that affect speed

    def submit(self, prompt: list[int], max_tokens: int) -> object:
        """Queue a prompt without computing anything."""

    def step(self) -> int: ...

    def clear(self) -> None: ...

    @property
    def busy(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Work:
    prompt_tokens: int
    batches: tuple[int, ...]
    steps: int
    requests: int
    request_prompt_tokens: int
    request_output_tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Tokens per second: of prefill, of decoding by batch size, and of output while serving."""

    prefill: float | None
    decode: dict[int, float]
    serve: float | None
    full_batch: float | None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def measure(engine: Engine, work: Work, alone: Alone = nullcontext) -> Figures:
    draw = random.Random(1)
    submit(engine, draw, count=1, prompt_tokens=16, max_tokens=4)
    drain(engine)
    prefill = measure_prefill(engine, work, draw, alone) if work.prompt_tokens else None
    decode = {batch: measure_decode(engine, work, draw, batch, alone=alone) for batch in work.batches}
    serve, full_batch = measure_serve(engine, work, draw, alone) if work.requests else (None, None)
    return Figures(prefill, decode, serve, full_batch)


def measure_prefill(engine: Engine, work: Work, draw: random.Random, alone: Alone) -> float:
    rates = []
    with alone():
        for _ in range(PREFILL_RUNS):
            submit(engine, draw, count=1, prompt_tokens=work.prompt_tokens, max_tokens=2)
            began = time.perf_counter()
            while engine.step() == 0:
                pass
            rates.append(work.prompt_tokens / (time.perf_counter() - began))
            engine.clear()
    return statistics.median(rates)


def measure_decode(engine: Engine, work: Work, draw: random.Random, batch: int, *, alone: Alone) -> float:
    submit(
        engine, draw, count=batch, prompt_tokens=work.prompt_tokens, max_tokens=work.steps + 2 * batch + 16
    )
    while engine.step() < batch:
        pass
    seconds = []
    with alone():
        for _ in range(work.steps):
            began = time.perf_counter()
            tokens = engine.step()
            seconds.append((time.perf_counter() - began) / tokens)
    engine.clear()
    return 1 / statistics.median(seconds)


def measure_serve(
    engine: Engine, work: Work, draw: random.Random, alone: Alone
) -> tuple[float, float | None]:
    lengths = {"prompt_tokens": work.request_prompt_tokens, "max_tokens": work.request_output_tokens}
    submit(engine, draw, count=work.requests, **lengths)
    tokens, full = 0, []
    with alone():
        began = time.perf_counter()
        while engine.busy:
            before = time.perf_counter()
            fresh = engine.step()
            tokens += fresh
            if fresh == work.requests:
                full.append(time.perf_counter() - before)
        seconds = time.perf_counter() - began
    wanted = work.requests * work.request_output_tokens
    if tokens != wanted:
        raise RuntimeError(f"{engine.name} generated {tokens} tokens instead of {wanted}")
    return tokens / seconds, work.requests / statistics.median(full) if full else None


def submit(engine: Engine, draw: random.Random, *, count: int, prompt_tokens: int, max_tokens: int) -> None:
    for _ in range(count):
        engine.submit([draw.randrange(VOCABULARY) for _ in range(prompt_tokens)], max_tokens)


def drain(engine: Engine) -> None:
    while engine.busy:
        engine.step()
