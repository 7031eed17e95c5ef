"""Adapters over HTTP and gRPC: chosen by the model's name, loaded and unloaded by operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny_adapters
from fake_adapters import FakeAdapters
from fakes import FakeCore, byte_tokenizer, small_config
from http_served import HttpServed, demo_http, http_served
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import NotFound
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.client.client import Client
from octavo.engine.frontend.async_engine import AsyncEngine
from octavo.engine.grpc.server import GrpcServer
from octavo.engine.memory.model_files import resolve_model
from served import LOCAL, collect

pytestmark = pytest.mark.server

PROMPT = "Once there was a"
CHAT = {
    "messages": [{"role": "user", "content": "Tell me a story about Mara and a lamp. " * 6}],
    "temperature": 0,
    "max_tokens": 12,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an adapter of the demo model."""
    root = tmp_path_factory.mktemp("adapters")
    tiny_adapters.make_adapter(root / "tale", resolve_model("demo"), rank=4)
    tiny_adapters.make_adapter(root / "other", resolve_model("demo"), rank=8, seed=9)
    return root


async def complete(server: HttpServed, model: str | None) -> Any:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12} | ({"model": model} if model else {})
    reply = await server.post("/v1/completions", body)
    return reply.json["choices"][0]["text"] if reply.status == 200 else reply.json["error"]["message"]


async def names(server: HttpServed) -> list[str]:
    return [card["id"] for card in (await server.get("/v1/models")).json["data"]]


async def test_the_models_name_chooses_the_adapter(folder: Path) -> None:
    async with demo_http(lora_modules=(f"tale={folder / 'tale'}",)) as server:
        assert await names(server) == ["demo", "tale"]
        card = (await server.get("/v1/models/tale")).json
        assert (card["parent"], card["root"]) == ("demo", str(folder / "tale"))
        base, tale = await complete(server, None), await complete(server, "tale")
        assert base == await complete(server, "demo") != tale
        for path, field in (("/v1/chat/completions", "choices"), ("/v1/messages", "content")):
            answers = [(await server.post(path, CHAT | {"model": each})).json for each in ("demo", "tale")]
            assert answers[0][field] != answers[1][field]
            assert answers[1]["model"] == "tale"
        assert "model must be 'demo' or 'tale'" in await complete(server, "other")


async def test_an_adapter_is_loaded_and_unloaded_while_serving(folder: Path) -> None:
    async with demo_http(lora_dir=folder) as server:
        base = await complete(server, "demo")
        body = {"lora_name": "late", "lora_path": "tale"}
        loaded = await server.post("/v1/load_lora_adapter", body)
        assert (loaded.status, loaded.json["id"], loaded.json["rank"]) == (200, "late", 4)
        assert await names(server) == ["demo", "late"]
        assert await complete(server, "late") != base
        again = await server.post("/v1/load_lora_adapter", body)
        assert again.status == 400
        assert "'late' twice" in again.json["error"]["message"]
        late = await complete(server, "late")
        inplace = body | {"load_inplace": True}
        refused = await server.post("/v1/load_lora_adapter", inplace | {"lora_path": "none"})
        assert refused.status == 400
        assert await complete(server, "late") == late
        assert (await server.post("/v1/load_lora_adapter", inplace | {"lora_path": "other"})).status == 200
        assert await complete(server, "late") not in (late, base)
        assert (await server.get("/v1/models/late")).json["root"] == str(folder / "other")
        assert (await server.post("/v1/load_lora_adapter", inplace)).status == 200
        assert await complete(server, "late") == late
        assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "late"})).status == 200
        assert await names(server) == ["demo"]
        assert "model must be 'demo'" in await complete(server, "late")
        assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "late"})).status == 404


async def test_paths_outside_the_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "allowed").mkdir()
    (tmp_path / "allowed" / "link").symlink_to(folder / "tale")
    config = small_config(lora_dir=tmp_path / "allowed")
    core = FakeCore(tokenizer=byte_tokenizer(), adapters=FakeAdapters())
    async with http_served(core, config=config) as server:
        for path in ("../x", "/etc", "link", str(folder / "tale"), "a/../../x"):
            reply = await server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
            assert reply.status == 400, path
            assert "lora_path must be below" in reply.json["error"]["message"]
        for name in ("", "a\nb", "x" * 300):
            reply = await server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "good"})
            assert "an adapter's name must have 1 to 256 characters" in reply.json["error"]["message"]
        assert (
            await server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "good"})
        ).status == 200


async def test_without_a_folder_nothing_is_loaded() -> None:
    async with http_served(FakeCore(tokenizer=byte_tokenizer(), adapters=FakeAdapters())) as server:
        reply = await server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "y"})
        assert reply.status == 400
        assert "--lora-dir" in reply.json["error"]["message"]


async def test_requests_over_grpc_name_their_adapter(folder: Path) -> None:
    engine = AsyncEngine(EngineConfig(num_pages=64, lora_modules=(f"tale={folder / 'tale'}",)))
    await engine.start()
    server = GrpcServer(engine)
    address = await server.start(LOCAL)
    params = SamplingParams(temperature=0, max_tokens=12)
    try:
        async with Client(str(address)) as client:
            texts = [
                (await collect(client.generate(PROMPT, params, adapter=each)))[0].text
                for each in (None, "tale")
            ]
            wanted = [
                (await collect(engine.generate(PROMPT, params, adapter=each)))[0].text
                for each in (None, "tale")
            ]
            assert texts == wanted
            assert texts[0] != texts[1]
            with pytest.raises(NotFound, match=r"adapter must be one that is loaded \(tale\), got 'other'"):
                await collect(client.generate(PROMPT, params, adapter="other"))
    finally:
        await server.stop()
        await engine.stop()
