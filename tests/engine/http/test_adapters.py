from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

import tiny_adapters
from fake_adapters import FakeAdapters
from fakes import FakeCore, byte_tokenizer, small_config
from http_served import HttpServed, demo_http, http_served
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import Forbidden, InvalidRequest, NotFound
from octavo.engine.api.outputs import Delta
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.client.client import Client
from octavo.engine.frontend.async_engine import AsyncEngine
from octavo.engine.grpc.security import Security
from octavo.engine.grpc.server import GrpcServer
from octavo.engine.http.endpoint import Services
from octavo.engine.memory.model_files import resolve_model
from served import LOCAL, collect
from vllm_worker import ask

pytestmark = pytest.mark.server

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "adapters.md"
PROMPT = "Once there was a"
CHAT = {
    "messages": [{"role": "user", "content": "Tell me a story about Mara and a lamp. " * 6}],
    "temperature": 0,
    "max_tokens": 12,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    tiny_adapters.make_adapter(root / "tale", resolve_model("demo"), rank=4)
    tiny_adapters.make_adapter(root / "other", resolve_model("demo"), rank=8, seed=9)
    return root


async def complete(server: HttpServed, model: str | None) -> Any:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12} | ({"model": model} if model else {})
    reply = await server.post("/v1/completions", body)
    return reply.json["choices"][0]["text"] if reply.status == 200 else reply.json["error"]["message"]


def embed_of(ids: list[int]) -> vllm_pb.EmbedRequest:
    return vllm_pb.EmbedRequest(request_id="e", tokenized=vllm_pb.TokenizedInput(input_ids=ids))


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
        reply = await server.post("/v1/load_lora_adapter", inplace | {"lora_path": "other"})
        assert json.dumps(reply.json | {"id": "pirate"}) in GUIDE.read_text(), "what the guide shows"
        assert await complete(server, "late") not in (late, base)
        assert (await server.get("/v1/models/late")).json["root"] == str(folder / "other")
        assert (await server.post("/v1/load_lora_adapter", inplace)).status == 200
        assert await complete(server, "late") == late
        reply = await server.post("/v1/unload_lora_adapter", {"lora_name": "late"})
        assert json.dumps(reply.json | {"id": "pirate"}) in GUIDE.read_text(), "what the guide shows"
        assert await names(server) == ["demo"]
        assert "model must be 'demo'" in await complete(server, "late")
        assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "late"})).status == 404


async def test_paths_outside_the_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "allowed").mkdir()
    (tmp_path / "allowed" / "link").symlink_to(folder / "tale")
    (tmp_path / "allowed" / "circle").symlink_to("circle")
    config = small_config(lora_dir=tmp_path / "allowed")
    core = FakeCore(tokenizer=byte_tokenizer(), adapters=FakeAdapters())
    async with http_served(core, config=config) as server:
        for path in ("../x", "/etc", "link", str(folder / "tale"), "a/../../x", "circle", "a\0b"):
            reply = await server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
            assert reply.status == 400, path
            assert "lora_path must be below" in reply.json["error"]["message"]
        for name in ("", "a\nb", "x" * 300):
            reply = await server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "good"})
            assert "an adapter's name must have 1 to 256 characters" in reply.json["error"]["message"]
        assert (
            await server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "good"})
        ).status == 200


async def test_an_unloaded_adapter_is_not_replaced_by_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = FakeCore(tokenizer=byte_tokenizer(), adapters=FakeAdapters())
    async with http_served(core, config=small_config(lora_dir=tmp_path)) as server:
        assert server.below is not None
        engine, check = server.below.engine, Services.check_model
        await engine.load_adapter("late", tmp_path)

        def then_unloaded(*args: Any) -> str:
            name = check(*args)
            assert engine._input is not None
            engine._input.adapters.clear()
            return name

        monkeypatch.setattr(Services, "check_model", then_unloaded)
        assert (await server.post("/v1/completions", {"model": "late", "prompt": "x"})).status == 404


async def test_without_a_folder_nothing_is_loaded() -> None:
    async with http_served(FakeCore(tokenizer=byte_tokenizer(), adapters=FakeAdapters())) as server:
        reply = await server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "y"})
        assert reply.status == 400
        assert "--lora-dir" in reply.json["error"]["message"]


async def test_adapters_over_grpc(folder: Path) -> None:
    engine = AsyncEngine(EngineConfig(num_pages=64, lora_dir=folder))
    await engine.start()
    server = GrpcServer(engine)
    address = await server.start(LOCAL)
    port = await server.start_adapter("tale", LOCAL)
    params = SamplingParams(temperature=0, max_tokens=12)
    try:
        async with Client(str(address)) as client, grpc.aio.insecure_channel(str(port)) as channel:
            worker = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            assert not (await worker.HealthCheck(vllm_pb.HealthCheckRequest())).healthy
            made = await client.load_adapter("tale", "tale")
            assert (made.name, made.rank, made.digest) == ("tale", 4, engine.adapters["tale"].digest)
            assert await client.adapters() == [made]
            assert (await worker.HealthCheck(vllm_pb.HealthCheckRequest())).healthy
            for stub, name in (
                (vllm_engine_pb2_grpc.VllmEngineStub(client._channel), "demo"),
                (worker, "tale"),
            ):
                info = await stub.GetModelInfo(vllm_pb.GetModelInfoRequest())
                assert info.served_model_name == name
            with pytest.raises(InvalidRequest, match="'tale' twice"):
                await client.load_adapter("tale", "other")

            async def said(adapter: str | None) -> Delta:
                return (await collect(client.generate(PROMPT, params, adapter=adapter)))[0]

            base, tale = await said(None), await said("tale")
            assert base.text != tale.text
            ids = engine.tokenizer.encode(PROMPT)
            responses = [r async for r in worker.Generate(ask(ids=ids, stream=False, max_tokens=12))]
            assert tuple(responses[-1].complete.output_ids) == tale.token_ids
            vectors = [await client.embed(PROMPT, adapter=each) for each in (None, "tale")]
            assert vectors[0] != vectors[1]
            assert (await worker.Embed(embed_of(ids))).embedding == pytest.approx(vectors[1])
            client.metadata = (*(client.metadata or ()), ("octavo-adapter", "tale"))
            assert (await said(None)).token_ids == tale.token_ids
            with pytest.raises(InvalidRequest, match="must name one adapter, got 2"):
                await said("other")
            client.metadata = ()
            await client.load_adapter("tale", "other", replace=True)
            assert (await said("tale")).text not in (tale.text, base.text)
            await client.unload_adapter("tale")
            assert await client.adapters() == []
            with pytest.raises(NotFound, match=r"adapter must be a loaded one \(none\), got 'tale'"):
                await said("tale")
    finally:
        await server.stop()
        await engine.stop()


async def test_tenants_use_their_adapters_alone(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice Alice0\nbob Bob0\noperator Root0\n")
    config = small_config(lora_dir=tmp_path, lora_tenants=("a=alice", "ab=alice", "ab=bob"))
    core = FakeCore(tokenizer=byte_tokenizer(), adapters=FakeAdapters())
    async with http_served(core, config=config, security=Security(token_file=tokens)) as server:

        def key(name: str) -> dict[str, str]:
            return {"authorization": f"Bearer {name}0"}

        for name in ("a", "ab", "all"):
            load = {"lora_name": name, "lora_path": name}
            refused = await server.post("/v1/load_lora_adapter", load, **key("Alice"))
            assert refused.status == 403
            assert (await server.post("/v1/load_lora_adapter", load, **key("Root"))).status == 200
        assert server.below is not None
        for tenant, own in {"Alice": "a ab all", "Bob": "ab all", "Root": "a ab all"}.items():
            listed = (await server.get("/v1/models", **key(tenant))).json["data"]
            assert [card["id"] for card in listed] == ["fake", *own.split()]
            async with Client(server.below.address) as client:
                client.metadata = tuple(key(tenant).items())
                assert [each.name for each in await client.adapters()] == own.split()
                for name in ("a", "ab", "all", "none"):
                    answer = await server.post(
                        "/v1/completions", {"model": name, "prompt": "x"}, **key(tenant)
                    )
                    wanted = 404 if name == "none" else 200 if name in own.split() else 403
                    assert answer.status == wanted, (tenant, name)
                    if wanted == 403:
                        assert "--lora-tenants" in answer.json["error"]["message"]
                        with pytest.raises(Forbidden, match="open to this tenant, got 'a'"):
                            await collect(client.generate("x", SamplingParams(max_tokens=1), adapter=name))
                with contextlib.ExitStack() as stack:
                    if tenant != "Root":
                        stack.enter_context(pytest.raises(Forbidden, match="only the tenant 'operator'"))
                    await client.unload_adapter("all")
                    await client.load_adapter("all", "all")
