from __future__ import annotations

import asyncio
import logging
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from engines import Gate
from fakes import small_config
from octavo.engine.api.errors import (
    EngineDead,
    InvalidConfig,
    InvalidRequest,
    OctavoError,
    Overloaded,
    Unauthenticated,
)
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.cli import main
from octavo.engine.client.client import Client
from octavo.engine.client.credentials import ClientCredentials
from octavo.engine.client.server_process import ServerProcess
from octavo.engine.grpc.security import Security, TlsFiles, read_tokens
from octavo.engine.grpc.tenant_salts import TenantSalts, load_tenant_salts
from served import collect, eventually, eventually_async, served, wholes

pytestmark = pytest.mark.server

ALICE, BOB = "alice-0123456789", "bob~secret+/=="
SHORT = SamplingParams(max_tokens=3)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_files(folder: Path, authority: trustme.CA, *, clients: trustme.CA | None = None) -> TlsFiles:
    issued = authority.issue_cert("127.0.0.1", "localhost")
    cert, key, ca = folder / "server.pem", folder / "server.key", folder / "clients.pem"
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    if clients is None:
        return TlsFiles(cert=cert, key=key)
    clients.cert_pem.write_to_path(ca)
    return TlsFiles(cert=cert, key=key, client_ca=ca)


def trusting(folder: Path, authority: trustme.CA, *, own: trustme.CA | None = None) -> ClientCredentials:
    ca, cert, key = folder / "ca.pem", folder / "client.pem", folder / "client.key"
    authority.cert_pem.write_to_path(ca)
    if own is None:
        return ClientCredentials(ca=ca)
    issued = own.issue_cert("client@example.org")
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    return ClientCredentials(ca=ca, cert=cert, key=key)


def token_file(folder: Path, text: str, name: str = "tokens") -> Path:
    path = folder / name
    path.write_text(text)
    return path


async def refusal(address: str, credentials: ClientCredentials | None = None) -> OctavoError:
    async with Client(address, credentials) as client:
        with pytest.raises(OctavoError) as caught:
            await client.model_info()
    return caught.value


async def test_tls_is_spoken_and_nothing_else(tmp_path: Path, authority: trustme.CA) -> None:
    security = Security(tls=server_files(tmp_path, authority))
    async with served(security=security, credentials=trusting(tmp_path, authority)) as its:
        assert (await collect(its.client.generate("hello", SHORT)))[0].finish_reason is FinishReason.LENGTH
        assert isinstance(await refusal(its.address), EngineDead), "plain text"
        (tmp_path / "other").mkdir()
        stranger = trusting(tmp_path / "other", trustme.CA())
        assert "--tls-ca" in str(await refusal(its.address, stranger))


async def test_mtls_wants_a_certificate_of_the_right_authority(tmp_path: Path, authority: trustme.CA) -> None:
    own, other = trustme.CA(), trustme.CA()
    security = Security(tls=server_files(tmp_path, authority, clients=own))
    async with served(security=security, credentials=trusting(tmp_path, authority, own=own)) as its:
        assert (await its.client.model_info()).name == "fake"
        for name, certificate in (("none", None), ("wrong", other)):
            (tmp_path / name).mkdir()
            error = await refusal(its.address, trusting(tmp_path / name, authority, own=certificate))
            assert isinstance(error, EngineDead), name


async def test_a_renewed_certificate_is_used_after_a_reload(tmp_path: Path, authority: trustme.CA) -> None:
    security = Security(tls=server_files(tmp_path, authority))
    before = trusting(tmp_path, authority)
    async with served(security=security, credentials=before) as its:
        running = its.client.generate("hello", SamplingParams(max_tokens=200))
        first = await anext(running)
        renewed = trustme.CA()
        server_files(tmp_path, renewed)
        (tmp_path / "after").mkdir()
        after = trusting(tmp_path / "after", renewed)
        assert isinstance(await refusal(its.address, after), EngineDead), "not before the reload"
        security.reload()
        async with Client(its.address, after) as client:
            assert (await client.model_info()).name == "fake"
        assert isinstance(await refusal(its.address, before), EngineDead)
        whole = wholes([first, *[delta async for delta in running]])
        assert whole[0].finish_reason is FinishReason.LENGTH, "connections go on"


async def test_only_tokens_of_the_file_are_accepted(tmp_path: Path) -> None:
    path = token_file(tmp_path, f"# who\n\nalice {ALICE}\nbob:{BOB}\n")
    security = Security(token_file=path)
    async with served(security=security, credentials=ClientCredentials(token_file=path)) as its:
        await collect(its.client.generate("hello", SHORT))
        stub = vllm_engine_pb2_grpc.VllmEngineStub(its.channel())
        for value in ("", "Bearer", "Bearer wrong", ALICE, f"Basic {ALICE}", f"Bearer {ALICE}x"):
            metadata = (("authorization", value),) if value else ()
            for call in (
                stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), metadata=metadata),
                stub.Generate(vllm_engine_pb2.GenerateRequest(), metadata=metadata).read(),
                its.client.stub.GenerateMany(iter([]), metadata=metadata).read(),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert ALICE not in str(caught.value.details())
        for value in (f"Bearer {BOB}", f"bearer {ALICE}"):
            await stub.GetModelInfo(
                vllm_engine_pb2.GetModelInfoRequest(), metadata=(("authorization", value),)
            )
        health = health_pb2_grpc.HealthStub(its.channel())
        reply = await health.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING, "probes carry no token"
        assert isinstance(await refusal(its.address), Unauthenticated)


async def test_tokens_follow_a_reload_and_a_broken_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = token_file(tmp_path, ALICE)
    alice = ClientCredentials(token_file=token_file(tmp_path, ALICE, "alice"))
    bob = ClientCredentials(token_file=token_file(tmp_path, BOB, "bob"))
    security = Security(token_file=path)
    async with served(security=security, credentials=alice) as its:
        path.write_text(f"{BOB}\n")
        await its.client.model_info()
        security.reload()
        with pytest.raises(Unauthenticated):
            await its.client.model_info()
        path.write_text("one two three secret\n")
        with caplog.at_level(logging.ERROR):
            security.reload()
        assert "line 1" in caplog.text
        assert "secret" not in caplog.text
        async with Client(its.address, bob) as client:
            await client.model_info()


async def test_tenants_share_neither_pages_nor_request_ids(tmp_path: Path) -> None:
    security = Security(token_file=token_file(tmp_path, f"a {ALICE}\na {ALICE}2\nb {BOB}\n"))
    tokens = [ClientCredentials(token_file=token_file(tmp_path, t, t[:3])) for t in (ALICE, BOB)]
    second = ClientCredentials(token_file=token_file(tmp_path, f"{ALICE}2", "second"))
    gate, prompt = Gate(), list(range(20, 40))
    async with served(gate=gate, security=security, credentials=tokens[0]) as its, \
            Client(its.address, tokens[1]) as bob, Client(its.address, second) as also_alice:  # fmt: skip
        gate.allow(30)
        for client, cached in ((its.client, 0), (bob, 0), (bob, 16), (also_alice, 16)):
            whole = await collect(client.generate(prompt, SHORT))
            assert whole[0].cached_tokens == cached
        streams = [
            client.generate([9], SamplingParams(max_tokens=200), request_id="same")
            for client in (its.client, bob)
        ]
        opened = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await eventually(lambda: len(its.engine._open.streams()) == 2, "both are in")
        gate.allow(5)
        firsts = await asyncio.gather(*opened)
        assert [first.request_id for first in firsts] == ["same", "same"]
        with pytest.raises(InvalidRequest, match="same"):
            await collect(also_alice.generate([9], SHORT, request_id="same"))
        assert await bob.abort("same", "other") == ["same"]
        gate.allow(3)
        assert (await collect(streams[1]))[0].finish_reason is FinishReason.ABORT
        assert await bob.abort("same") == []
        assert its.server.handler.num_active == 1
        gate.open()
        assert (await collect(streams[0]))[0].finish_reason is FinishReason.LENGTH
        await eventually(lambda: its.server.handler.num_active == 0, "nobody is served")


@pytest.mark.parametrize(("lines", "most"), [(f"a {ALICE}\nb {BOB}\n", 2), (f"a {ALICE}\n", 4)])
async def test_a_tenant_has_a_share_of_the_queue_where_there_are_several(
    lines: str, most: int, tmp_path: Path
) -> None:
    security = Security(token_file=token_file(tmp_path, lines))
    alice = ClientCredentials(token_file=token_file(tmp_path, ALICE, "alice"))
    gate, config = Gate(), small_config(max_running=1, max_waiting=3)
    async with served(gate=gate, config=config, security=security, credentials=alice) as its:
        streams = [its.client.generate([9], SamplingParams(max_tokens=200)) for _ in range(most)]
        tasks = [asyncio.ensure_future(collect(stream)) for stream in streams]
        await eventually(lambda: its.server.handler.num_active == most, "all are let in")
        await eventually(lambda: len(its.engine._open.streams()) == most, "all are let in")
        with pytest.raises(Overloaded, match="of this tenant" if most == 2 else "requests are unfinished"):
            await collect(its.client.generate([9], SHORT))
        if most == 2:
            bob = ClientCredentials(token_file=token_file(tmp_path, BOB, "bob"))
            async with Client(its.address, bob) as client:
                answer = asyncio.ensure_future(collect(client.generate([9], SHORT)))
                await eventually(lambda: len(its.engine._open.streams()) == most + 1, "bob is let in")
                gate.open()
                assert len((await answer)[0].token_ids) > 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_salts_of_tenants_cannot_be_made_by_others() -> None:
    salts = TenantSalts(b"k" * 32)
    assert salts.of("") == b""
    assert len(salts.of("a")) == len(salts.of("ab" * 20)) == 32
    assert salts.of("a") != salts.of("b")
    assert salts.of("a") == TenantSalts(b"k" * 32).of("a")
    assert len({salts.of("a"), TenantSalts(b"l" * 32).of("a"), TenantSalts().of("a")}) == 3


def test_the_salt_key_is_private_and_stays_with_the_pages(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    first = load_tenant_salts(folder).of("a")
    assert load_tenant_salts(folder).of("a") == first, "a restart finds its tenants' pages"
    (file,) = folder.iterdir()
    assert (file.stat().st_mode & 0o777, len(file.read_bytes())) == (0o600, 32)
    assert load_tenant_salts(tmp_path / "other").of("a") != first
    assert load_tenant_salts(None).of("a") != load_tenant_salts(None).of("a")
    file.write_bytes(b"cut")
    with pytest.raises(InvalidConfig, match="must have 32 bytes, got 3; remove it"):
        load_tenant_salts(folder)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match="--cache-dir"):
        load_tenant_salts(tmp_path / "file")


def test_servers_that_begin_at_once_share_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        salts = list(pool.map(lambda _: load_tenant_salts(tmp_path).of("a"), range(32)))
    assert len(set(salts)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [".tenant_key"]


async def test_a_tenants_pages_are_found_after_a_restart_with_the_folders_key(tmp_path: Path) -> None:
    prompt = list(range(20, 40))
    credentials = ClientCredentials(token_file=token_file(tmp_path, ALICE, "alice"))
    found = []
    for salts in (load_tenant_salts(tmp_path), load_tenant_salts(tmp_path), TenantSalts()):
        security = Security(token_file=token_file(tmp_path, f"a {ALICE}\n"), salts=salts)
        config = small_config(cache_dir=tmp_path / "pages")
        async with served(config=config, security=security, credentials=credentials) as its:
            found.append((await collect(its.client.generate(prompt, SHORT)))[0].cached_tokens)
    assert found == [0, 16, 0]


WRONG_TOKENS = {
    "empty": ("", "at least one token"),
    "comments only": ("# nothing\n\n", "at least one token"),
    "three words": ("a b c", "line 1"),
    "control character": ("ok\nna\x07ughty", "line 2"),
    "not ASCII": ("tökén", "line 1"),
    "tenant": ("a/b token", "line 1"),
    "repeated": ("a same\nb same", "line 2"),
}


@pytest.mark.parametrize("case", WRONG_TOKENS)
def test_unusable_token_files(case: str, tmp_path: Path) -> None:
    text, hint = WRONG_TOKENS[case]
    with pytest.raises(InvalidConfig, match=hint) as caught:
        read_tokens(token_file(tmp_path, text))
    assert "same" not in str(caught.value)


def test_a_token_without_a_tenant_is_one_of_its_own(tmp_path: Path) -> None:
    tenants = read_tokens(token_file(tmp_path, f"{ALICE}\nx {BOB}\nx: third\n fourth \n")).values()
    assert len(set(tenants)) == 3
    assert list(tenants).count("x") == 2
    assert not any(ALICE in tenant for tenant in tenants)


def test_unusable_certificates(tmp_path: Path, authority: trustme.CA) -> None:
    good = server_files(tmp_path, authority, clients=authority)
    assert good.client_ca is not None
    other = tmp_path / "other.key"
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(other)
    rubbish = token_file(tmp_path, "rubbish", "rubbish.pem")
    for files, hint in (
        (TlsFiles(cert=tmp_path / "none.pem", key=good.key), "none.pem"),
        (TlsFiles(cert=good.cert, key=tmp_path / "none.key"), "none.key"),
        (TlsFiles(cert=rubbish, key=good.key), "rubbish.pem"),
        (TlsFiles(cert=good.cert, key=other), "other.key"),
        (TlsFiles(cert=good.cert, key=good.key, client_ca=rubbish), "rubbish.pem"),
    ):
        with pytest.raises(InvalidConfig, match=hint):
            Security(tls=files)


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["serve", "--tls-cert", "a"], "--tls-key"),
        (["serve", "--tls-client-ca", "a"], "--tls-cert"),
        (["serve", "--tls-cert", "no.pem", "--tls-key", "no.key"], "no.pem"),
        (["serve", "--auth-token-file", "no-tokens"], "no-tokens"),
        (["generate", "x", "--tls-ca", "a"], "--connect"),
        (["generate", "x", "--connect", "127.0.0.1:1", "--tls-cert", "a"], "--tls-key"),
        (["generate", "x", "--connect", "127.0.0.1:1", "--auth-token-file", "no-tokens"], "no-tokens"),
    ],
)
def test_wrong_options_are_reported_in_one_line(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--listen", "127.0.0.1:0", "--metrics", "off"] if argv[0] == "serve" else []
    assert main([*argv, *more]) == 2
    err = capsys.readouterr().err
    assert hint in err
    assert err.count("\n") == 1


async def test_the_command_serves_tls_and_reloads_on_hangup(
    tmp_path: Path, authority: trustme.CA, capsys: pytest.CaptureFixture[str]
) -> None:
    files = server_files(tmp_path, authority)
    client = trusting(tmp_path, authority)
    tokens = token_file(tmp_path, ALICE)
    new = token_file(tmp_path, BOB, "new")
    flags = ["--tls-cert", str(files.cert), "--tls-key", str(files.key), "--auth-token-file", str(tokens)]
    small = ["--num-pages", "64", "--max-running", "8", "--max-step-tokens", "64"]
    async with ServerProcess([*flags, *small]) as server:
        address = server.ready["grpc"]

        async def generate(token: Path) -> int:
            ask = ["generate", "Once", "--max-tokens", "2", "--connect", address]
            how = ["--tls-ca", str(client.ca), "--auth-token-file", str(token)]
            return await asyncio.to_thread(main, [*ask, *how])

        assert (await generate(tokens), await generate(new)) == (0, 2)
        tokens.write_text(BOB)
        server.signal(signal.SIGHUP)

        async def reloaded() -> bool:
            return await generate(new) == 0

        await eventually_async(reloaded, "the new token is let in")
        assert await generate(token_file(tmp_path, ALICE, "old")) == 2
        assert "secret" not in "".join(server.last_errors)
    assert server.returncode == 0
    assert ALICE not in capsys.readouterr().err
