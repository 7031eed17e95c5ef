from __future__ import annotations

import asyncio
from array import array
from collections import Counter

import pytest

from fakes import byte_tokenizer, fake_info, small_config
from octavo.engine.api.errors import EngineDead
from octavo.engine.core.commands import Command, ListReusedPrefixes
from octavo.engine.grpc.octavo_v1.cache import REST, ReuseReports
from octavo.engine.inspection.reuse_tree import ReusedPrefix


class FakeEngine:
    def __init__(self) -> None:
        self.info = fake_info(small_config())
        self.tokenizer = byte_tokenizer()
        self.asked: Counter[bytes] = Counter()
        self.is_dead = False
        self.seconds = 0.0
        self.draw_s = 0.0
        self._drawing = False

    async def ask(self, command: Command[list[ReusedPrefix]]) -> list[ReusedPrefix]:
        assert isinstance(command, ListReusedPrefixes)
        await asyncio.sleep(0)
        if self.is_dead:
            raise EngineDead("dead on purpose")
        self.asked[command.salt_prefix] += 1
        self._drawing = True
        number = self.asked[command.salt_prefix]
        return [ReusedPrefix(command.salt_prefix, array("I", [ord("a")] * 8), number)]

    def clock(self) -> float:
        now = self.seconds
        if self._drawing:
            self.seconds += self.draw_s
            self._drawing = False
        return now


def reports(engine: FakeEngine) -> ReuseReports:
    return ReuseReports(engine, keep_s=1.0, clock=engine.clock)  # type: ignore[arg-type]


async def hits(made: ReuseReports, tenant: bytes) -> list[int]:
    return [node.num_hits for node in await made.best(tenant, 10)]


async def test_calls_at_once_share_one_tree_and_later_ones_too_for_a_while() -> None:
    engine = FakeEngine()
    made = reports(engine)
    assert await asyncio.gather(*(hits(made, b"a") for _ in range(20))) == [[1]] * 20
    engine.seconds = 0.9
    assert await hits(made, b"a") == [1]
    engine.seconds = 1.0
    assert await hits(made, b"a") == [2]
    assert engine.asked == {b"a": 2}


async def test_a_tree_that_took_long_is_shown_longer() -> None:
    engine = FakeEngine()
    made = reports(engine)
    engine.draw_s = 0.5
    assert await hits(made, b"a") == [1]
    engine.seconds = 0.4 + REST * 0.5
    assert await hits(made, b"a") == [1]
    engine.seconds = 0.6 + REST * 0.5
    assert await hits(made, b"a") == [2]


async def test_tenants_have_trees_of_their_own_and_the_text_of_what_is_theirs() -> None:
    engine = FakeEngine()
    made = reports(engine)
    await hits(made, b"a")
    await hits(made, b"b")
    assert engine.asked == {b"a": 1, b"b": 1}
    (node,) = await made.best(b"a", 10)
    assert (node.start, node.end, node.text) == (0, 8, "a" * 8)
    assert await made.best(b"a", 0) == []


async def test_a_call_that_is_cancelled_or_fails_does_not_spoil_the_others() -> None:
    engine = FakeEngine()
    made = reports(engine)
    first = asyncio.ensure_future(hits(made, b"a"))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(hits(made, b"a"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == [1]
    engine.is_dead, engine.seconds = True, 100.0
    with pytest.raises(EngineDead):
        await hits(made, b"a")
    engine.is_dead = False
    assert await hits(made, b"a") == [2]
