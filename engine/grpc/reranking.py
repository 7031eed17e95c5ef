from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from ..api.errors import EngineStopping, RequestFailed, RequestTooLong
from ..api.outputs import Delta, FinishReason
from ..api.reranking import RerankAnswers, RerankPrompt, check_num_documents
from .interface import Caller
from .request_handler import RequestHandler

CONCURRENCY = 64  # concurrent documents of one call
MAX_CHARACTERS = 2**21  # characters of one call's prompts in memory


@dataclass(frozen=True, slots=True)
class Question:
    """A question to the model about several documents."""

    prompt: RerankPrompt
    query: str
    documents: Sequence[str]
    request_id: str = field(default="", kw_only=True)
    cache_salt: str = field(kw_only=True)
    priority: int = field(kw_only=True)
    adapter: str | None = field(kw_only=True)


async def score_documents(
    handler: RequestHandler, asked: Question, caller: Caller
) -> tuple[list[float], list[Delta]]:
    """Return the score and the output of each document. Raises an error if any document fails."""
    check_num_documents(len(asked.documents))
    tokenizer, max_tokens = handler.engine.tokenizer, handler.engine.info.max_model_len
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    answers = await handler.texts.run(handler.tenant_of(caller), asked.prompt.answers, encode)
    longest = max(asked.prompt.num_characters(asked.query, document) for document in asked.documents)
    if longest > max_tokens * tokenizer.longest_token:
        raise RequestTooLong(
            f"query, template and document of {longest} characters have more tokens than the "
            f"model's length of {max_tokens}; shorten them"
        )
    num_workers = min(len(asked.documents), CONCURRENCY, max(1, MAX_CHARACTERS // longest))
    left = iter(enumerate(asked.documents))
    found: dict[int, Delta] = {}

    async def work() -> None:
        for index, document in left:
            text = asked.prompt.prompt(asked.query, document)
            request_id = f"{asked.request_id}-{index}" if asked.request_id else ""
            found[index] = await _judged(handler, text, answers, asked, caller, request_id)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    deltas = [found[index] for index in range(len(asked.documents))]
    return [answers.score(delta.logprobs) for delta in deltas], deltas


async def _judged(
    handler: RequestHandler,
    text: str,
    answers: RerankAnswers,
    asked: Question,
    caller: Caller,
    request_id: str,
) -> Delta:
    deltas = handler.generate(
        text,
        answers.params(),
        context=caller,
        request_id=request_id,
        cache_salt=asked.cache_salt,
        priority=asked.priority,
        final_only=True,
        adapter=asked.adapter,
    )
    async with aclosing(deltas):
        async for delta in deltas:
            if delta.finish_reason is FinishReason.ERROR:
                raise RequestFailed(delta.error or "a document could not be scored")
            if delta.finish_reason is FinishReason.ABORT:
                break
            return delta
    raise EngineStopping("the request ended before its document was scored; send the request again")
