from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ..api.errors import EngineStopping, RequestFailed
from ..api.outputs import Delta, FinishReason
from ..api.prompt import Prompt
from ..api.sampling_params import SamplingParams
from .endpoint import Services
from .exchange import Exchange

MAX_PROMPTS = 2048  # prompts of one request
CONCURRENCY = 64  # concurrent prompts of one request
BACKLOG = 16  # unread deltas of a request with several prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    prompts: Sequence[Prompt]
    params: SamplingParams
    model: str
    request_id: str = ""
    cache_salt: str = ""
    priority: int = 0
    final_only: bool = False


@dataclass(slots=True)
class Usage:
    """Token counts, updated during generation."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    _seen: set[int] = field(default_factory=set)

    def add(self, prompt: int, delta: Delta) -> None:
        if prompt not in self._seen:
            self._seen.add(prompt)
            self.prompt_tokens += delta.prompt_tokens
            self.cached_tokens += delta.cached_tokens
        self.completion_tokens += len(delta.token_ids)

    def info(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def run(services: Services, exchange: Exchange, job: Job) -> AsyncGenerator[tuple[int, Delta], None]:
    """Stream deltas, each with its prompt's index. Raises RequestFailed or EngineStopping."""
    if len(job.prompts) == 1:
        return _deltas(services, exchange, job, 0)
    return _interleaved(services, exchange, job)


async def _interleaved(
    services: Services, exchange: Exchange, job: Job
) -> AsyncGenerator[tuple[int, Delta], None]:
    output: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(BACKLOG)
    todo = iter(range(len(job.prompts)))

    async def serve() -> None:
        for index in todo:
            async with aclosing(_deltas(services, exchange, job, index)) as source:
                async for item in source:
                    await output.put(item)

    async def serve_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(CONCURRENCY, len(job.prompts))):
                    group.create_task(serve())
        except ExceptionGroup as errors:
            await output.put(errors.exceptions[0])
        else:
            await output.put(None)

    work = asyncio.create_task(serve_all())
    try:
        while (item := await output.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        work.cancel()
        await asyncio.wait([work])


async def _deltas(
    services: Services, exchange: Exchange, job: Job, index: int
) -> AsyncGenerator[tuple[int, Delta], None]:
    request_id = job.request_id
    if request_id and len(job.prompts) > 1:
        request_id = f"{request_id}-{index}"
    deltas = services.handler.generate(
        job.prompts[index],
        job.params,
        context=exchange,
        request_id=request_id,
        cache_salt=job.cache_salt,
        priority=job.priority,
        final_only=job.final_only,
        adapter=services.adapter(job.model),
    )
    async with aclosing(deltas):
        async for delta in deltas:
            if delta.finish_reason is FinishReason.ERROR:
                raise RequestFailed(delta.error or "computing this request failed")
            if delta.finish_reason is FinishReason.ABORT:
                raise EngineStopping("the request was ended before its output was complete; send it again")
            yield index, delta


def new_id(prefix: str, given: str = "") -> str:
    return f"{prefix}-{given or uuid.uuid4().hex}"
