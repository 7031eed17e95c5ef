"""/v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's form. Only operators may use them."""

from __future__ import annotations

from .endpoint import Services
from .exchange import Exchange
from .request_model import RequestModel


class UnloadRequest(RequestModel):
    """A request of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None


class LoadRequest(UnloadRequest):
    """A request of /v1/load_lora_adapter. ``lora_path``: a folder below the server's ``--lora-dir``."""

    lora_path: str
    load_inplace: bool = False


async def serve_load(services: Services, request: LoadRequest, exchange: Exchange) -> None:
    """Load an adapter; with ``load_inplace``, replace a loaded one of the same name."""
    info = await services.handler.load_adapter(
        request.lora_name, request.lora_path, context=exchange, replace=request.load_inplace
    )
    await exchange.answer({"object": "adapter", "id": info.name, "rank": info.rank, "bytes": info.nbytes})


async def serve_unload(services: Services, request: UnloadRequest, exchange: Exchange) -> None:
    """Unload an adapter that no request uses."""
    await services.handler.unload_adapter(request.lora_name, context=exchange)
    await exchange.answer({"object": "adapter", "id": request.lora_name, "deleted": True})
