from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..api.errors import EngineStopping, RequestFailed
from ..api.outputs import Delta, FinishReason
from ..api.prompt import Prompt
from ..api.sampling_params import SamplingParams
from .endpoint import Services
from .exchange import Exchange
from .request_model import RequestModel

MAX_PROMPTS = 2048  # prompts of one request
CONCURRENCY = 64  # concurrent prompts of one request
BACKLOG = 16  # unread deltas of a request with several prompts

Deltas: TypeAlias = AsyncGenerator[tuple[int, Delta], None]


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


def asked_of(
    services: Services, request: RequestModel, exchange: Exchange, index: int | None = None
) -> dict[str, Any]:
    """Return the arguments of the handler for one request; ``index`` is its place among several."""
    suffix = "" if index is None or not exchange.request_id else f"-{index}"
    return {
        "context": exchange,
        "request_id": exchange.request_id + suffix,
        "cache_salt": getattr(request, "cache_salt", None) or "",
        "priority": getattr(request, "priority", None) or 0,
        "adapter": services.adapter(getattr(request, "model", None)),
    }


def run(
    services: Services,
    exchange: Exchange,
    request: RequestModel,
    prompts: Sequence[Prompt],
    params: SamplingParams,
) -> Deltas:
    """Stream deltas, each with its prompt's index. Raises RequestFailed or EngineStopping."""

    def start(index: int) -> Deltas:
        asked = asked_of(services, request, exchange, None if len(prompts) == 1 else index)
        final_only = not getattr(request, "stream", None)
        return _checked(
            services.handler.generate(prompts[index], params, final_only=final_only, **asked), index
        )

    return start(0) if len(prompts) == 1 else _interleaved(start, len(prompts))


async def _interleaved(start: Callable[[int], Deltas], count: int) -> Deltas:
    output: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(BACKLOG)
    todo = iter(range(count))

    async def serve() -> None:
        for index in todo:
            async with aclosing(start(index)) as source:
                async for item in source:
                    await output.put(item)

    async def serve_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(CONCURRENCY, count)):
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


async def _checked(deltas: AsyncGenerator[Delta, None], index: int) -> Deltas:
    async with aclosing(deltas):
        async for delta in deltas:
            if delta.finish_reason is FinishReason.ERROR:
                raise RequestFailed(delta.error or "computing this request failed")
            if delta.finish_reason is FinishReason.ABORT:
                raise EngineStopping("the request was ended before its output was complete; send it again")
            yield index, delta


def new_id(prefix: str, given: str = "") -> str:
    return f"{prefix}-{given or uuid.uuid4().hex}"
