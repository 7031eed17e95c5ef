from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from octavo.proto import generation_pb2 as pb

from ...api.errors import InvalidRequest
from ...api.outputs import Delta
from ...api.reranking import RerankPrompt, check_top_n, ranked
from ...api.sampling_params import Pooling
from ..request_handler import RequestHandler
from ..reranking import score_documents
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
    asked = messages.asked_of(request, context)
    asked["request_id"] = asked["request_id"] or uuid.uuid4().hex
    vector, delta = await handler.embed(
        messages.prompt_of(request, max_tokens=handler.engine.info.max_model_len),
        pooling=_POOLING[request.pooling],
        dimensions=request.dimensions if request.HasField("dimensions") else None,
        normalize=request.normalize if request.HasField("normalize") else True,
        **asked,
    )
    return pb.EmbedResponse(request_id=asked["request_id"], embedding=vector, usage=_usage([delta]))


async def rerank(handler: RequestHandler, request: pb.RerankRequest, context: Context) -> pb.RerankResponse:
    """Return the scores of all documents. Raises an error if any document fails."""
    top_n = request.top_n if request.HasField("top_n") else None
    check_top_n(top_n)
    prompt = RerankPrompt(**{name: getattr(request, name) for name in _WORDS if request.HasField(name)})
    asked = messages.asked_of(request, context)
    scores, deltas = await score_documents(handler, prompt, request.query, request.documents, **asked)
    response = pb.RerankResponse()
    for document in ranked(scores, top_n):
        response.results.add(index=document.index, score=document.score)
    response.usage.CopyFrom(_usage(deltas))
    return response


def _usage(deltas: Sequence[Delta]) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=sum(delta.prompt_tokens for delta in deltas),
        cached_tokens=sum(delta.cached_tokens for delta in deltas),
    )
