"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM. Only operators may use them."""

from __future__ import annotations

from .endpoint import Services
from .exchange import Exchange
from .request_model import RequestModel


class UnloadRequest(RequestModel):
    lora_name: str
    lora_int_id: int | None = None


class LoadRequest(UnloadRequest):
    """``lora_path`` is a folder below ``--lora-dir``."""

    lora_path: str
    load_inplace: bool = False


async def serve_load(services: Services, request: LoadRequest, exchange: Exchange) -> None:
    info = await services.handler.load_adapter(
        request.lora_name, request.lora_path, context=exchange, replace=request.load_inplace
    )
    await exchange.answer({"object": "adapter", "id": info.name, "rank": info.rank, "bytes": info.nbytes})


async def serve_unload(services: Services, request: UnloadRequest, exchange: Exchange) -> None:
    await services.handler.unload_adapter(request.lora_name, context=exchange)
    await exchange.answer({"object": "adapter", "id": request.lora_name, "deleted": True})
