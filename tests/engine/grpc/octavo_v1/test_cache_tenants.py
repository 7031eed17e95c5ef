from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from fakes import FakeCore, small_config
from octavo.block_manager.page_pool import PagePool
from octavo.engine.api.errors import Forbidden, NotFound, Overloaded
from octavo.engine.api.outputs import Delta
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.client.cache_client import prefix_of
from octavo.engine.client.client import Client
from octavo.engine.client.credentials import ClientCredentials
from octavo.engine.grpc.security import Security
from octavo.proto import cache_pb2 as pb
from octavo.proto import generation_pb2
from served import collect, served

pytestmark = pytest.mark.server

TOKENS = {"a": "alice-0123456789", "b": "bob-0123456789", "operator": "root-0123456789"}
SHORT = SamplingParams(max_tokens=2)
PROMPT = list(range(10, 32))


def tenants(folder: Path) -> tuple[Security, dict[str, ClientCredentials]]:
    everyone = folder / "tokens"
    everyone.write_text("".join(f"{tenant} {token}\n" for tenant, token in TOKENS.items()))
    own = {}
    for tenant, token in TOKENS.items():
        (folder / tenant).write_text(token)
        own[tenant] = ClientCredentials(token_file=folder / tenant)
    return Security(token_file=everyone), own


async def say(client: Client, ids: list[int], name: str | None = None, *, salt: str = "") -> Delta:
    return (await collect(client.generate(ids, SHORT, request_id=name, salt=salt)))[0]


async def test_tenants_see_their_own_requests_pins_prefixes_and_events(tmp_path: Path) -> None:
    security, own = tenants(tmp_path)
    config = small_config(max_pinned_pages=20)
    async with served(config=config, security=security, credentials=own["a"]) as its, \
            Client(its.address, own["b"]) as bob:  # fmt: skip
        async with aclosing(bob.cache.watch()) as stream:
            first = await anext(stream)
            await say(its.client, PROMPT, "same")
            hidden = await anext(stream)
            assert (hidden.number, hidden.WhichOneof("event")) == (first.number + 1, None)
            await say(bob, PROMPT, "same")
            assert len((await anext(stream)).stored.digests) == 5
        await say(its.client, PROMPT, "again")
        assert (await bob.cache.explain("same")).cached_tokens == 0
        with pytest.raises(NotFound):
            await bob.cache.explain("again")
        with pytest.raises(NotFound):
            await bob.cache.pin("p", prefix_of(request_id="again"))
        await its.client.cache.pin("p", prefix_of(token_ids=PROMPT))
        assert [prefix.num_hits for prefix in (await its.client.cache.stats()).prefixes] == [1]
        theirs = await bob.cache.stats()
        assert (list(theirs.prefixes), list(theirs.pins)) == ([], [])
        with pytest.raises(NotFound):
            await bob.cache.unpin("p")
        assert [pin.name for pin in (await its.client.cache.stats()).pins] == ["p"]


async def events_until(stream: AsyncGenerator[pb.WatchResponse, None], number: int) -> list[pb.WatchResponse]:
    responses = [await asyncio.wait_for(anext(stream), 20)]
    while responses[-1].number < number:
        responses.append(await asyncio.wait_for(anext(stream), 20))
    return responses


async def test_watchers_never_see_other_tenants_pages(tmp_path: Path) -> None:
    security, own = tenants(tmp_path)
    core, config = FakeCore(), small_config(num_pages=16)
    async with served(core, config=config, security=security, credentials=own["a"]) as its, \
            Client(its.address, own["b"]) as bob:  # fmt: skip
        async with aclosing(its.client.cache.watch()) as alices, aclosing(bob.cache.watch()) as bobs:
            first = await anext(alices)
            await anext(bobs)
            for number in range(6):
                await say(its.client, [number] * 22)
                await say(bob, [number] * 22)
            assert core.core is not None
            log = core.core.cache.blocks.events
            await its.client.cache.stats()
            seen = [await events_until(stream, log.next_number - 1) for stream in (alices, bobs)]
        events = log.since(first.number + 1)
        prefixes = [security.salts.of(tenant) for tenant in "ab"]
        stored = [
            {digest for event in events if event.salt.startswith(prefix) for digest in event.digests}
            for prefix in prefixes
        ]
        removed = {digest for event in events if event.kind == "removed" for digest in event.digests}
        assert all(digests & removed for digests in stored), "pages of both have given way"
        for responses, mine in zip(seen, stored, strict=True):
            assert {digest for response in responses for digest in response.stored.digests} == mine
            assert {digest for response in responses for digest in response.removed.digests} == mine & removed
            assert [response.number for response in responses] == [event.number for event in events]


async def test_a_tenant_may_watch_as_often_as_its_share_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.engine.grpc.page_events.MAX_WATCHERS", 5)
    security, own = tenants(tmp_path)
    async with served(security=security, credentials=own["a"]) as its, \
            Client(its.address, own["b"]) as bob, contextlib.AsyncExitStack() as stack:  # fmt: skip

        async def watch(client: Client) -> None:
            stream = await stack.enter_async_context(aclosing(client.cache.watch()))
            await asyncio.wait_for(anext(stream), 20)

        for _ in range(2):
            await watch(its.client)
        with pytest.raises(Overloaded, match="2 streams watch the cache, but at most 2 of one tenant"):
            await watch(its.client)
        for _ in range(2):
            await watch(bob)


async def test_tenants_may_pin_only_their_share(tmp_path: Path) -> None:
    security, own = tenants(tmp_path)
    config = small_config(max_pinned_pages=10)
    async with served(config=config, security=security, credentials=own["a"]) as its, \
            Client(its.address, own["b"]) as bob:  # fmt: skip
        other = list(range(50, 72))
        for client in (its.client, bob):
            await say(client, PROMPT)
        await say(its.client, other)
        await its.client.cache.pin("one", prefix_of(token_ids=PROMPT))
        with pytest.raises(Overloaded, match=r"5 pages are pinned by you and 5 in all.*--max-pinned-pages"):
            await its.client.cache.pin("two", prefix_of(token_ids=other))
        assert (await bob.cache.pin("one", prefix_of(token_ids=PROMPT))).pinned_pages == 10
        await its.client.cache.unpin("one")
        assert (await its.client.cache.pin("two", prefix_of(token_ids=other))).num_tokens == 20


async def test_misses_reveal_nothing_about_other_tenants(tmp_path: Path) -> None:
    security, own = tenants(tmp_path)
    async with served(security=security, credentials=own["a"]) as its, \
            Client(its.address, own["b"]) as bob:  # fmt: skip
        await say(its.client, PROMPT, "secret")
        before = await bob.cache.stats()
        await say(bob, PROMPT, "guess")
        guess = await bob.cache.explain("guess")
        assert pb.MissReason.Name(guess.reason) == "MISS_REASON_NEW"
        assert pb.MISS_REASON_OTHER_SALT not in {miss.reason for miss in guess.misses}
        assert "salt" not in guess.text
        after = await bob.cache.stats()
        assert pb.MISS_REASON_OTHER_SALT not in {miss.reason for miss in (*before.misses, *after.misses)}
        await say(bob, PROMPT, "own", salt="x")
        assert pb.MissReason.Name((await bob.cache.explain("own")).reason) == "MISS_REASON_OTHER_SALT"


async def test_a_guess_costs_the_same_whatever_others_have_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[int] = []
    acquire = PagePool.acquire

    def counting(pool: PagePool, digests: list[Any]) -> list[Any]:
        pages = acquire(pool, digests)
        looked_up.append(min(len(digests), len(pages) + 1))
        return pages

    monkeypatch.setattr(PagePool, "acquire", counting)
    security, own = tenants(tmp_path)
    seen = []
    for others in ([], [PROMPT], [PROMPT[:12]], [[*PROMPT, *range(60)]]):
        core = FakeCore()
        async with served(core, security=security, credentials=own["a"]) as its, \
                Client(its.address, own["b"]) as bob:  # fmt: skip
            for prompt in others:
                await say(its.client, prompt)
            looked_up.clear()
            steps = its.num_steps
            delta = await say(bob, PROMPT)
            seen.append((delta.cached_tokens, tuple(looked_up), its.num_steps - steps))
    assert seen[0][0] == 0
    assert seen[0][1], "the look-up is what is counted"
    assert set(seen) == {seen[0]}


async def test_only_operators_change_the_shared_cache(tmp_path: Path) -> None:
    security, own = tenants(tmp_path)
    async with served(security=security, credentials=own["a"]) as its, \
            Client(its.address, own["operator"]) as operator:  # fmt: skip
        await say(its.client, PROMPT)
        actions: list[Callable[[], Any]] = [
            its.client.cache.flush,
            lambda: its.client.cache.save("x"),
            lambda: its.client.cache.load("x"),
        ]
        for action in actions:
            with pytest.raises(Forbidden, match="operator"):
                await action()
        assert await operator.cache.flush() == 5


async def test_a_salt_comes_with_the_message_or_with_the_call() -> None:
    async with served() as its:
        await say(its.client, PROMPT, salt="s")
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=PROMPT),
            sampling=generation_pb2.SamplingParams(max_tokens=1),
        )

        async def cached(*metadata: tuple[str, str]) -> int:
            call = its.client.stub.Generate(request, metadata=metadata)
            return max([int(response.usage.cached_tokens) async for response in call])

        assert await cached(("octavo-cache-salt", "other")) == 0
        assert await cached(("octavo-cache-salt", "s")) == 20
        assert await cached() == 0
        request.cache_salt = "s"
        assert await cached(("octavo-cache-salt", "s")) == 20
        with pytest.raises(grpc.aio.AioRpcError, match="2 different cache salts"):
            await cached(("octavo-cache-salt", "t"))
