from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ..api.errors import RequestTooLong
from ..api.outputs import Delta
from ..api.reranking import RerankPrompt, check_num_documents
from .request_handler import RequestHandler, in_parallel

CONCURRENCY = 64  # concurrent documents of one call
MAX_CHARACTERS = 2**21  # characters of one call's prompts in memory


async def score_documents(
    handler: RequestHandler, prompt: RerankPrompt, query: str, documents: Sequence[str], **asked: Any
) -> tuple[list[float], list[Delta]]:
    """Return the score and the output of each document; ``asked`` are arguments of ``generate``. Raises an
    error if any document fails."""
    check_num_documents(len(documents))
    tokenizer, max_tokens = handler.engine.tokenizer, handler.engine.info.max_model_len
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    answers = await handler.texts.run(handler.tenant(asked["context"]), prompt.answers, encode)
    longest = max(prompt.num_characters(query, document) for document in documents)
    if longest > max_tokens * tokenizer.longest_token:
        raise RequestTooLong(
            f"query, template and document of {longest} characters have more tokens than the "
            f"model's length of {max_tokens}; shorten them"
        )

    async def judge(index: int) -> Delta:
        name = asked["request_id"]
        own = asked | {"request_id": f"{name}-{index}" if name else ""}
        return await handler.whole(prompt.prompt(query, documents[index]), answers.params(), **own)

    most = min(CONCURRENCY, max(1, MAX_CHARACTERS // longest))
    deltas = await in_parallel(judge, len(documents), most)
    return [answers.score(delta.logprobs) for delta in deltas], deltas
