"""/v1/embeddings."""

from __future__ import annotations

import base64
import struct
from contextlib import aclosing
from typing import Literal

from ..api.embedding import check_dimensions, finished
from ..api.errors import RequestFailed
from ..api.sampling_params import Pooling, SamplingParams
from .completions import PromptField, prompts_of
from .endpoint import Services
from .exchange import Exchange, json_list, json_of
from .generation import Usage, run
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
    check_dimensions(request.dimensions)
    cut = prompt_cut(
        services,
        request.truncate_prompt_tokens,
        request.truncation_side,
        default_side="right",
        special=request.add_special_tokens is not False,
    )
    prompts = [await cut.encoded(services, exchange, each) for each in prompts_of("input", request.input)]
    params = SamplingParams(max_tokens=1, ignore_eos=True, pooling=request.pooling or "last")
    as_text = request.encoding_format == "base64"
    found: dict[int, bytes] = {}
    usage = Usage()
    async with aclosing(run(services, exchange, request, prompts, params)) as deltas:
        async for prompt, delta in deltas:
            usage.add(prompt, delta)
            if delta.embedding is None:
                raise RequestFailed("the request ended without an embedding; send the request again")
            normalize = request.normalize is not False
            vector = finished(delta.embedding, dimensions=request.dimensions, normalize=normalize)
            item = {
                "object": "embedding",
                "index": prompt,
                "embedding": _base64(vector) if as_text else vector,
            }
            found[prompt] = json_of(item)
    counts = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    answer = {"object": "list", "data": [], "model": name, "usage": counts}
    data = json_list(found[index] for index in range(len(prompts)))
    await exchange.answer_bytes(json_of(answer, data=data))


def _base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
