from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.block_manager import BlockManager, Digest, EventLog, EventsLost
from octavo.block_manager.miss_reasons import Evictions
from octavo.block_manager.page_pool import PagePool
from octavo.block_manager.policies.base import LRU


def serve(blocks: BlockManager, tokens: list[int]) -> list[Digest]:
    table = blocks.open(tokens)
    assert blocks.reserve(table, len(tokens))
    blocks.commit(table, tokens, len(tokens))
    blocks.close(table)
    return table.digests


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=12), st.integers(6, 12))
def test_events_tell_which_pages_are_cached(prompts: list[list[int]], num_pages: int) -> None:
    blocks = BlockManager(num_pages, 2)
    known: set[Digest] = set()
    cursor = 1
    for prompt in prompts:
        digests = serve(blocks, prompt)
        for event in blocks.events.since(cursor):
            assert event.number == cursor
            cursor += 1
            if event.kind == "stored":
                assert event.parent is None or event.parent in known
                assert not known & set(event.digests)
                known |= set(event.digests)
            else:
                assert set(event.digests) <= known
                known -= set(event.digests)
        assert set(digests) <= known
        assert len(known) == blocks.counts.idle_cached


@pytest.mark.parametrize("num_known", [1, 2, 3])
def test_pages_published_around_known_ones_are_named_with_their_parents(num_known: int) -> None:
    pool, names = PagePool(10, LRU()), [Digest(bytes([number])) for number in range(5)]
    pages, contents = pool.allocate(10) or [], [bytes([10 + number]) for number in range(5)]
    known = range(1, 1 + num_known)
    pool.publish([pages[at] for at in known], [names[at] for at in known], None)
    pool.publish(pages[5:], names, Digest(b"root"), contents=contents)
    told = [(event.digests, event.parent, event.contents) for event in pool.events.since(2)]
    last = 1 + num_known
    after = (names[last:], names[last - 1], contents[last:])
    assert told == [([names[0]], Digest(b"root"), contents[:1]), after]


@given(
    st.lists(st.tuples(st.sampled_from([b"", b"a", b"ab", b"b"]), st.integers(0, 3)), max_size=20),
    st.integers(4, 8),
)
def test_removed_events_name_the_salts_of_pages(prompts: list[tuple[bytes, int]], num_pages: int) -> None:
    blocks = BlockManager(num_pages, 2)
    salt_of: dict[Digest, bytes] = {}
    for salt, token in prompts:
        table = blocks.open([token] * 5, salt=salt)
        assert blocks.reserve(table, 5)
        blocks.commit(table, [token] * 5, 5)
        blocks.close(table)
        salt_of.update(dict.fromkeys(table.digests, salt))
    blocks.flush()
    removed = [event for event in blocks.events.since(1) if event.kind == "removed"]
    assert {digest for event in removed for digest in event.digests} == set(salt_of)
    for event in removed:
        for prefix in (b"", b"a", b"b"):
            own = [digest for digest in event.digests if salt_of[digest].startswith(prefix)]
            assert list(event.digests_of(prefix)) == own
    assert not blocks.events._salts, "nothing is kept of pages that nobody finds"


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 8))
def test_the_log_is_bounded_and_reports_lost_events(sizes: list[int], capacity: int) -> None:
    log = EventLog(capacity)
    for size in sizes:
        log.add_stored([Digest(b"x")] * size, None)
    kept = log.since(log.next_number - 1) if sizes else []
    number = log.next_number - len(kept)
    while number > 1:
        try:
            kept = log.since(number - 1)
        except EventsLost:
            break
        number -= 1
    assert (
        len(kept) == 1 or max(len(kept), sum(len(event.digests) for event in kept)) <= capacity or not sizes
    )
    for bad in (number - 1, log.next_number + 1):
        with pytest.raises(EventsLost, match=f"got {bad}"):
            log.since(bad)


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=20), st.integers(1, 12))
def test_the_latest_evictions_are_remembered(runs: list[list[int]], capacity: int) -> None:
    evictions, order = Evictions(capacity), list[tuple[int, float]]()
    for now, run in enumerate(runs):
        evictions.add([Digest(bytes([value])) for value in dict.fromkeys(run)], float(now))
        order += [(value, float(now)) for value in dict.fromkeys(run)]
    latest = dict(order)
    for value, _ in order[-capacity:]:
        assert evictions.when(Digest(bytes([value]))) == latest[value]
    assert evictions.when(Digest(b"never")) is None


def test_pages_that_follow_name_the_page_before_them() -> None:
    blocks = BlockManager(8, 2)
    table = blocks.open([1])
    for length in (2, 6):
        assert blocks.reserve(table, length)
        blocks.commit(table, [1, 2, 3, 4, 5, 6], length)
    first, then = blocks.events.since(1)
    assert (first.digests, first.parent) == (table.digests[:1], None)
    assert (then.digests, then.parent) == (table.digests[1:], table.digests[0])
