"""/v1/rerank, as in the APIs of Jina, Cohere and vLLM."""

from __future__ import annotations

from typing import Any

from ..api.reranking import RerankPrompt, check_top_n, ranked
from ..grpc.reranking import score_documents
from .endpoint import Services
from .exchange import Exchange
from .generation import asked_of, new_id
from .request_model import RequestModel, only


class DocumentText(RequestModel):
    text: str


class RerankRequest(RequestModel):
    """Request of /v1/rerank. ``instruction``, ``template``, ``yes`` and ``no`` set the prompt."""

    query: str
    documents: list[str | DocumentText]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    user: str | None = None
    instruction: str | None = None
    template: str | None = None
    yes: str | None = None
    no: str | None = None
    max_chunks_per_doc: int | None = None
    max_tokens_per_doc: int | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


async def serve_rerank(services: Services, request: RerankRequest, exchange: Exchange) -> None:
    name = services.check_model(request.model, exchange)
    for field in ("max_chunks_per_doc", "max_tokens_per_doc", "truncate_prompt_tokens"):
        only(field, getattr(request, field), (), "documents are not truncated")
    check_top_n(request.top_n)
    words = {
        word: value
        for word in ("instruction", "template", "yes", "no")
        if (value := getattr(request, word)) is not None
    }
    documents = [item if isinstance(item, str) else item.text for item in request.documents]
    asked = asked_of(services, request, exchange)
    scores, deltas = await score_documents(
        services.handler, RerankPrompt(**words), request.query, documents, **asked
    )
    results: list[dict[str, Any]] = []
    for found in ranked(scores, request.top_n):
        results.append({"index": found.index, "relevance_score": found.score})
        if request.return_documents is not False:
            results[-1]["document"] = {"text": documents[found.index]}
    num_prompt = sum(delta.prompt_tokens for delta in deltas)
    await exchange.answer(
        {
            "id": new_id("rerank", exchange.request_id),
            "model": name,
            "usage": {"prompt_tokens": num_prompt, "total_tokens": num_prompt},
            "results": results,
        }
    )
