from __future__ import annotations

from pathlib import Path

import pytest

from fakes import small_config
from octavo.engine.api.errors import InvalidRequest, NotConfigured, NotFound, Overloaded
from octavo.engine.api.outputs import Delta
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.client.cache_client import prefix_of
from octavo.proto import cache_pb2 as pb
from served import Served, all_idle, collect, eventually, served

pytestmark = pytest.mark.server

SHORT = SamplingParams(max_tokens=2)
PROMPT = list(range(10, 32))  # five pages of 4 tokens, and two more tokens


async def say(its: Served, ids: list[int], name: str | None = None, *, salt: str = "") -> Delta:
    deltas = its.client.generate(ids, SHORT, request_id=name, salt=salt)
    return (await collect(deltas))[0]


async def reason(its: Served, name: str) -> tuple[int, int, str]:
    found = await its.client.cache.explain(name)
    return found.cached_tokens, found.miss_position, pb.MissReason.Name(found.reason)


async def test_an_explanation_depends_on_earlier_requests() -> None:
    async with served() as its:
        await say(its, PROMPT, "first")
        await say(its, PROMPT, "again")
        await say(its, PROMPT[:20], "whole pages")
        await say(its, [*PROMPT[:8], 1, *PROMPT[9:]], "other tail")
        await say(its, PROMPT, "salted", salt="s")
        assert await reason(its, "first") == (0, 0, "MISS_REASON_NEW")
        assert await reason(its, "again") == (20, 20, "MISS_REASON_PARTIAL_PAGE")
        assert await reason(its, "whole pages") == (16, 16, "MISS_REASON_LAST_TOKEN")
        assert await reason(its, "other tail") == (8, 8, "MISS_REASON_NEW")
        assert await reason(its, "salted") == (0, 0, "MISS_REASON_OTHER_SALT")
        again = await its.client.cache.explain("again")
        assert "20 of 22 prompt tokens were cached" in again.text
        assert not again.HasField("evicted_seconds_before")
        misses = {miss.reason: miss.tokens for miss in (await its.client.cache.explain("other tail")).misses}
        assert misses == {pb.MISS_REASON_NEW: 12, pb.MISS_REASON_PARTIAL_PAGE: 2}
        for unknown in ("never", "x" * 200):
            with pytest.raises(NotFound, match="no request with this id"):
                await its.client.cache.explain(unknown)
        with pytest.raises(InvalidRequest, match="request_id"):
            await its.client.cache.explain("")


async def test_an_evicted_page_says_when() -> None:
    async with served(config=small_config(num_pages=8)) as its:
        await say(its, PROMPT, "first")
        await say(its, list(range(100, 126)), "pressure")
        await say(its, PROMPT, "late")
        found = await its.client.cache.explain("late")
        assert pb.MissReason.Name(found.reason) == "MISS_REASON_EVICTED"
        assert 0 <= found.evicted_seconds_before < 60
        assert "was evicted" in found.text
        stats = await its.client.cache.stats()
        assert stats.evicted_pages > 0
        assert {miss.reason: miss.tokens for miss in stats.misses}[pb.MISS_REASON_EVICTED] > 0


async def test_without_a_cache_that_is_the_reason() -> None:
    async with served(config=small_config(prefix_cache=False)) as its:
        await say(its, PROMPT, "first")
        await say(its, PROMPT, "again")
        assert await reason(its, "again") == (0, 0, "MISS_REASON_DISABLED")
        assert "--no-prefix-cache" in (await its.client.cache.explain("again")).text
        stats = await its.client.cache.stats()
        assert (stats.enabled, stats.hit_tokens, stats.query_tokens) == (False, 0, 44)


async def test_stats_count_and_list_reused_prefixes() -> None:
    system = list(range(40, 56))
    async with served(config=small_config(num_pages=256)) as its:
        for number in range(4):
            await say(its, [*system, *[60 + number] * 8, 1])
        for _ in range(3):
            await say(its, [*system, *[60] * 8, 2])
        await say(its, PROMPT)
        await say(its, PROMPT)
        stats = await its.client.cache.stats()
        assert (stats.page_size, stats.policy, stats.enabled) == (4, "lru", True)
        assert stats.query_tokens == 4 * 25 + 3 * 25 + 2 * 22
        assert stats.hit_tokens == 3 * 16 + 3 * 24 + 20
        assert stats.query_tokens == stats.hit_tokens + sum(miss.tokens for miss in stats.misses)
        assert stats.pages.held + stats.pages.idle_cached + stats.pages.idle_empty == 256
        shown = [(p.end, p.num_hits, p.tokens_saved) for p in stats.prefixes]
        assert shown == [(24, 3, 72), (16, 3, 48), (20, 1, 20)]
        assert [p.text for p in stats.prefixes[:2]] == [
            bytes(system).decode() + "<" * 8,
            bytes(system).decode(),
        ]
        assert sum(p.tokens_saved for p in stats.prefixes) == stats.hit_tokens
        few = await its.client.cache.stats(1)
        assert [p.end for p in few.prefixes] == [24]
        with pytest.raises(InvalidRequest, match="num_prefixes"):
            await its.client.cache.stats(1001)


async def test_a_flush_drops_pages_without_holders() -> None:
    async with served() as its:
        await say(its, PROMPT, "first")
        assert await its.client.cache.flush() == 5
        assert its.engine.gauges().pages_idle_cached == 0, "seen at once, without another step"
        assert await its.client.cache.flush() == 0
        assert (await say(its, PROMPT, "later")).cached_tokens == 0
        assert its.engine.gauges().pages_held == 0


async def test_pins_outlive_pressure_until_they_are_released() -> None:
    async with served(config=small_config(num_pages=24, max_pinned_pages=6)) as its:
        cache = its.client.cache
        await say(its, PROMPT, "system")
        pinned = await cache.pin("mine", prefix_of(token_ids=PROMPT))
        assert (pinned.num_tokens, pinned.prefix_tokens, pinned.pinned_pages) == (20, 22, 5)
        for number in range(12):
            await say(its, [number] * 60)
        assert (await say(its, PROMPT, "still")).cached_tokens == 20
        stats = await cache.stats()
        assert [(pin.name, pin.num_tokens) for pin in stats.pins] == [("mine", 20)]
        assert (stats.pinned_pages, stats.max_pinned_pages) == (5, 6)
        with pytest.raises(Overloaded, match="5 pages are pinned, and this pin would exceed the limit of 6"):
            await cache.pin("too much", prefix_of(token_ids=[11] * 60))
        assert (await cache.unpin("mine")).pinned_pages == 0
        with pytest.raises(NotFound, match="'mine'"):
            await cache.unpin("mine")
        for number in range(12):
            await say(its, [number + 100] * 60)
        assert (await say(its, PROMPT, "gone")).cached_tokens == 0
        await eventually(lambda: all_idle(its.engine), "pages of pins are held by nobody")


async def test_a_pin_by_request_keeps_its_answer_and_its_salt() -> None:
    async with served(config=small_config(max_pinned_pages=20)) as its:
        deltas = its.client.generate(PROMPT, SamplingParams(max_tokens=11), request_id="r", salt="s")
        answer = (await collect(deltas))[0].token_ids
        pinned = await its.client.cache.pin("r", prefix_of(request_id="r"))
        assert (pinned.prefix_tokens, pinned.num_tokens) == (33, 32)
        await its.client.cache.flush()
        turn = [*PROMPT, *answer, 1]
        assert (await say(its, turn, salt="s")).cached_tokens == 32
        assert (await say(its, turn)).cached_tokens == 0
        by_text = prefix_of(text="nothing of the sort")
        with pytest.raises(NotFound, match="none of these 19 tokens is cached"):
            await its.client.cache.pin("text", by_text)


async def test_pins_are_refused_with_the_remedy() -> None:
    async with served() as its:
        await say(its, PROMPT)
        with pytest.raises(NotConfigured, match="--max-pinned-pages"):
            await its.client.cache.pin("mine", prefix_of(token_ids=PROMPT))
        for what, message in (
            (prefix_of(), "set one of text, token_ids, chat and request_id"),
            (prefix_of(token_ids=[10_000]), "10000"),
            (prefix_of(request_id="r", cache_salt="s"), "has a salt of its own"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                await its.client.cache.pin("mine", what)
        with pytest.raises(InvalidRequest, match="1 to 256 characters"):
            await its.client.cache.pin("", prefix_of(token_ids=PROMPT))


async def test_a_page_on_disk_in_another_format_is_explained(tmp_path: Path) -> None:
    async with served(config=small_config(cache_dir=tmp_path)) as its:
        await say(its, PROMPT)
    kinds = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(kinds) == 1
    kinds[0].rename(tmp_path / ("0" * 32))  # as if another model had written the folder
    async with served(config=small_config(cache_dir=tmp_path)) as its:
        await say(its, [*PROMPT[:8], *range(200, 210)], "begins like it")
        await say(its, [77] * 22, "other")
        assert await reason(its, "begins like it") == (0, 0, "MISS_REASON_OTHER_FORMAT")
        assert await reason(its, "other") == (0, 0, "MISS_REASON_NEW")
        assert "another page format" in (await its.client.cache.explain("begins like it")).text
