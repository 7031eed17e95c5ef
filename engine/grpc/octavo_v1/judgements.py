"""Embeddings of prompts and relevance scores of documents, for octavo.v1."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Mapping
from contextlib import aclosing

from octavo.proto import generation_pb2 as pb

from ...api.embedding import check_dimensions, finished
from ...api.errors import InvalidRequest, RequestFailed, RequestTooLong
from ...api.outputs import Delta, FinishReason
from ...api.reranking import RerankAnswers, RerankPrompt, check_num_documents, check_top_n, ranked
from ...api.sampling_params import Pooling, SamplingParams
from ..request_handler import RequestHandler
from ..status import Context
from . import messages

RERANK_CONCURRENCY = 64  # concurrent documents of one call
RERANK_CHARACTERS = 2**21  # characters of one call's prompts in memory
_POOLING: Mapping[int, Pooling] = {
    pb.POOLING_UNSPECIFIED: "last",
    pb.POOLING_LAST: "last",
    pb.POOLING_MEAN: "mean",
}
_WORDS = ("instruction", "template", "yes", "no")


async def embed(handler: RequestHandler, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
    """Embed one prompt."""
    if request.pooling not in _POOLING:
        known = ", ".join(pb.Pooling.keys())
        raise InvalidRequest(f"pooling {request.pooling} is unknown; use one of {known}")
    dimensions = request.dimensions if request.HasField("dimensions") else None
    check_dimensions(dimensions)
    params = SamplingParams(max_tokens=1, ignore_eos=True, pooling=_POOLING[request.pooling])
    request_id = request.request_id or uuid.uuid4().hex
    deltas = handler.generate(
        messages.prompt_of(request, max_tokens=handler.engine.info.max_model_len),
        params,
        context=context,
        request_id=request_id,
        cache_salt=request.cache_salt,
        priority=request.priority,
        final_only=True,
        adapter=request.adapter or None,
    )
    async with aclosing(deltas):
        async for delta in deltas:
            if delta.embedding is None:
                break
            normalize = request.normalize if request.HasField("normalize") else True
            vector = finished(delta.embedding, dimensions=dimensions, normalize=normalize)
            return pb.EmbedResponse(request_id=request_id, embedding=vector, usage=_usage(delta))
    raise RequestFailed(delta.error or "the request ended before its embedding was computed")


async def rerank(handler: RequestHandler, request: pb.RerankRequest, context: Context) -> pb.RerankResponse:
    """Return the scores of all documents; raise if one fails."""
    top_n = request.top_n if request.HasField("top_n") else None
    check_top_n(top_n)
    prompt = RerankPrompt(**{name: getattr(request, name) for name in _WORDS if request.HasField(name)})
    check_num_documents(len(request.documents))
    encode = functools.partial(handler.engine.tokenizer.encode, add_special_tokens=False)
    answers = await handler.texts.run(handler.tenant_of(context), prompt.answers, encode)
    query, documents = request.query, list(request.documents)
    longest = max(prompt.num_characters(query, document) for document in documents)
    tokenizer, max_tokens = handler.engine.tokenizer, handler.engine.info.max_model_len
    if longest > max_tokens * tokenizer.longest_token:
        raise RequestTooLong(
            f"query, template and document of {longest} characters have more tokens than the "
            f"model's length of {max_tokens}; shorten them"
        )
    # Each prompt has a copy of the query, so the number of prompts in memory is bounded.
    num_workers = min(len(documents), RERANK_CONCURRENCY, max(1, RERANK_CHARACTERS // longest))
    left = iter(enumerate(documents))
    found: dict[int, Delta] = {}

    async def judge() -> None:
        for index, document in left:
            text = prompt.prompt(query, document)
            found[index] = await _judged(handler, text, answers, request, context)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(judge())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    deltas = [found[index] for index in range(len(documents))]
    response = pb.RerankResponse()
    for document in ranked((answers.score(delta.logprobs) for delta in deltas), top_n):
        response.results.add(index=document.index, score=document.score)
    response.usage.prompt_tokens = sum(delta.prompt_tokens for delta in deltas)
    response.usage.cached_tokens = sum(delta.cached_tokens for delta in deltas)
    return response


async def _judged(
    handler: RequestHandler, text: str, answers: RerankAnswers, request: pb.RerankRequest, context: Context
) -> Delta:
    deltas = handler.generate(
        text,
        answers.params(),
        context=context,
        request_id="",
        cache_salt=request.cache_salt,
        priority=request.priority,
        final_only=True,
        adapter=request.adapter or None,
    )
    async with aclosing(deltas):
        async for delta in deltas:
            if delta.finish_reason is FinishReason.ERROR:
                raise RequestFailed(delta.error or "a document could not be judged")
            return delta
    raise RequestFailed("the request ended before its document was judged")


def _usage(delta: Delta) -> pb.Usage:
    return pb.Usage(prompt_tokens=delta.prompt_tokens, cached_tokens=delta.cached_tokens)
