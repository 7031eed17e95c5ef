from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import aclosing

from octavo.proto import generation_pb2 as pb

from ...api.embedding import check_dimensions, finished
from ...api.errors import InvalidRequest, RequestFailed
from ...api.outputs import Delta
from ...api.reranking import RerankPrompt, check_top_n, ranked
from ...api.sampling_params import Pooling, SamplingParams
from ..request_handler import RequestHandler
from ..reranking import Question, score_documents
from ..status import Context
from . import messages

_POOLING: Mapping[int, Pooling] = {
    pb.POOLING_UNSPECIFIED: "last",
    pb.POOLING_LAST: "last",
    pb.POOLING_MEAN: "mean",
}
_WORDS = ("instruction", "template", "yes", "no")


async def embed(handler: RequestHandler, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
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
    """Return the scores of all documents. Raises an error if any document fails."""
    top_n = request.top_n if request.HasField("top_n") else None
    check_top_n(top_n)
    question = Question(
        RerankPrompt(**{name: getattr(request, name) for name in _WORDS if request.HasField(name)}),
        request.query,
        request.documents,
        cache_salt=request.cache_salt,
        priority=request.priority,
        adapter=request.adapter or None,
    )
    scores, deltas = await score_documents(handler, question, context)
    response = pb.RerankResponse()
    for document in ranked(scores, top_n):
        response.results.add(index=document.index, score=document.score)
    response.usage.prompt_tokens = sum(delta.prompt_tokens for delta in deltas)
    response.usage.cached_tokens = sum(delta.cached_tokens for delta in deltas)
    return response


def _usage(delta: Delta) -> pb.Usage:
    return pb.Usage(prompt_tokens=delta.prompt_tokens, cached_tokens=delta.cached_tokens)
