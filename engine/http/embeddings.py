"""/v1/embeddings."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Literal

from ..api.prompt import Prompt
from ..api.sampling_params import Pooling
from ..grpc.request_handler import in_parallel
from .completions import PromptField, prompts_of
from .endpoint import Services
from .exchange import Exchange, json_list, json_of
from .generation import CONCURRENCY, asked_of
from .prompts import Side, prompt_cut
from .request_model import RequestModel


class EmbeddingRequest(RequestModel):
    """``pooling`` and ``normalize`` are Octavo's extensions."""

    input: PromptField
    model: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


async def serve_embeddings(services: Services, request: EmbeddingRequest, exchange: Exchange) -> None:
    name = services.check_model(request.model, exchange)
    cut = prompt_cut(services, request, default_side="right")
    prompts = [await cut.encoded(services, exchange, each) for each in prompts_of("input", request.input)]
    found = await in_parallel(
        lambda index: _embedding(services, request, exchange, prompts, index), len(prompts), CONCURRENCY
    )
    num_prompt = sum(count for _, count in found)
    counts = {"prompt_tokens": num_prompt, "total_tokens": num_prompt}
    answer = {"object": "list", "data": [], "model": name, "usage": counts}
    await exchange.answer_bytes(json_of(answer, data=json_list(item for item, _ in found)))


async def _embedding(
    services: Services, request: EmbeddingRequest, exchange: Exchange, prompts: Sequence[Prompt], index: int
) -> tuple[bytes, int]:
    vector, delta = await services.handler.embed(
        prompts[index],
        pooling=request.pooling or "last",
        dimensions=request.dimensions,
        normalize=request.normalize is not False,
        **asked_of(services, request, exchange, None if len(prompts) == 1 else index),
    )
    shown = _base64(vector) if request.encoding_format == "base64" else vector
    return json_of({"object": "embedding", "index": index, "embedding": shown}), delta.prompt_tokens


def _base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
