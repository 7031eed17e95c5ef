from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ledger import visible
from octavo.block_manager import (
    NULL_PAGE,
    BlockManager,
    FullAttention,
    KVGroupSpec,
    ResidualWindow,
    SlidingWindow,
)
from octavo.block_manager.page_index import PageIndex, parents_first
from octavo.block_manager.spec import UNBOUNDED
from octavo.block_manager.types import Digest
from strategies import page_groups

sizes = st.integers(1, 5)


@given(st.data(), sizes, st.integers(1, 6), st.integers(0, 40))
def test_pages_are_those_of_the_positions_that_are_seen(
    data: st.DataObject, page_size: int, max_chunk: int, at: int
) -> None:
    groups = data.draw(page_groups(20, page_size, max_chunk))
    spec = data.draw(st.sampled_from(groups))

    def seen(query: int, end: int) -> set[int]:
        return {
            position // page_size
            for position in range(end)
            if visible(groups, spec, query, position, page_size=page_size)
        }

    first = spec.first_visible(at) // page_size
    kept = range(spec.sink_pages(page_size))
    assert seen(at, at) <= {*range(first, at // page_size + 1), *kept}, "what is seen is not given back"
    num_pages = at // page_size
    needed = list(spec.needed_pages(num_pages, page_size))
    assert set(needed) >= seen(num_pages * page_size, num_pages * page_size)
    assert needed == sorted(set(needed), reverse=True)
    most = spec.max_pages(page_size, max_chunk=max_chunk)
    held = {*range(first, -(-(at + max_chunk) // page_size)), *kept}
    assert len(held) <= most, "a chunk's pages, and what its first row sees"
    publishable = spec.publishable_pages(page_size)
    assert all(index < publishable for index in needed), "what a hit needs is published"


@given(st.sampled_from([FullAttention(num_pages=9), SlidingWindow(num_pages=9, window=6)]), sizes)
def test_the_longest_sequence_depends_on_pool_and_window(spec: KVGroupSpec, page_size: int) -> None:
    positions = spec.max_positions(page_size, max_chunk=4, num_pinned=2)
    bounded = spec.max_pages(page_size, max_chunk=4) <= 7
    assert positions == (UNBOUNDED if bounded else 7 * page_size)


def test_the_useful_pool_size_of_a_window_is_bounded() -> None:
    window = SlidingWindow(num_pages=1, window=9, keep=3)
    assert window.useful_pages(4, max_running=3, max_step_tokens=16) == 2 * 3 * (1 + 3 + 1) + (1 + 7)
    residual = ResidualWindow(num_pages=1, window=1, keep=3, residual_of=0)
    assert residual.useful_pages(4, max_running=3, max_step_tokens=16) == 3 * (1 + 1 + 1) + (1 + 5)
    assert FullAttention(num_pages=1).useful_pages(4, max_running=3, max_step_tokens=16) == UNBOUNDED
    assert window.decode_pages(8, 4) == 2
    assert window.decode_pages(10**6, 4) == 1 + 3


def test_entries_of_freed_pages_name_no_page() -> None:
    blocks = BlockManager((SlidingWindow(num_pages=8, window=6, keep=2),), 4, max_chunk=8)
    tokens = list(range(20))
    table = blocks.open(tokens)
    for stop in (8, 16, 20):
        assert blocks.reserve(table, stop)
        blocks.commit(table, tokens, stop)
    part = table.parts[0]
    assert part.window_start == 3
    assert list(part.pages[1:3]) == [NULL_PAGE] * 2
    blocks.check()
    part.pages[2] = 5
    with pytest.raises(AssertionError, match="names a released page"):
        blocks.check()


def test_the_index_is_bounded_and_keeps_parents_of_cached_pages() -> None:
    cached: set[Digest] = set()
    index = PageIndex(2, is_cached=cached.__contains__)
    names = [Digest(bytes([number])) for number in range(60)]
    index.add(names[:3], [b"\0\0\0\0"] * 3, None, b"s")
    cached.add(names[2])
    for name in names[3:]:
        index.add([name], [b"\1\0\0\0"], None, b"")
        assert len(index) <= 2 * 3 + 1
    kept = index.cached_pages()
    assert list(kept) == names[:3]
    assert {(page.tokens, page.salt) for page in kept.values()} == {(b"\0\0\0\0", b"s")}
    assert list(parents_first(index.cached(cached.__contains__))) == [], "nobody goes on after evicted pages"
    cached |= set(names[:3])
    assert [digest for digest, _ in parents_first(index.cached(cached.__contains__))] == names[:3]
