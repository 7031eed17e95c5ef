from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeCore, small_config
from octavo.block_manager import BlockManager, Miss
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.inspection.lookup_history import LookupHistory
from octavo.engine.inspection.reuse_tree import ReusedPrefix, ReusedPrefixes, ReuseTree
from octavo.scheduler import Lookup, Sequence, Status


def lookup(tokens: list[int], num_hit: int = 0) -> Lookup:
    sequence = Sequence("s", tokens, 4)
    return Lookup(sequence, len(tokens), num_hit, {"new": len(tokens) - num_hit}, Miss(0, "new"))


def test_the_latest_requests_are_remembered_and_what_they_have_said() -> None:
    memory = LookupHistory(most_requests=2)
    for name in ("a", "b", "b", "c"):
        memory.add(name, found := lookup([1, 2, 3]), now=1.0)
    assert memory.get("a") is None
    assert len(memory) == 2
    remembered = memory.get("c")
    assert remembered is not None
    found.sequence.tokens.append(9)
    assert remembered.tokens == (1, 2, 3, 9)
    memory.ended("c")
    assert remembered.tokens == (1, 2, 3, 9), "it has not ended: another request of this id has"
    found.sequence.status = Status.FINISHED
    memory.ended("c")
    memory.ended("nobody")
    assert isinstance(remembered.source, array)
    assert remembered.tokens == (1, 2, 3, 9)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=30))
def test_tokens_of_ended_requests_are_bounded(requests: list[tuple[int, int]]) -> None:
    memory = LookupHistory(most_requests=8, most_tokens=10)
    for name, length in requests:
        memory.add(str(name), found := lookup([7] * length), now=0.0)
        found.sequence.status = Status.FINISHED
        memory.ended(str(name))
        kept = [memory.get(str(known)) for known in range(6)]
        sizes = [len(entry.tokens) for entry in kept if entry is not None]
        assert sum(sizes) <= 10 or len(sizes) == 1
        assert memory.get(str(name)) is not None, "the newest stays"


def hit(prefixes: ReusedPrefixes, blocks: BlockManager, tokens: list[int], salt: bytes) -> int:
    sequence = Sequence("s", tokens, 1, salt)
    sequence.table = table = blocks.open(tokens, salt=salt)
    if num_hit := table.num_written:
        prefixes.add(sequence, num_hit)
    assert blocks.reserve(table, len(tokens))
    blocks.commit(table, tokens, len(tokens))
    blocks.close(table)
    return num_hit


prompt = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@given(st.lists(st.tuples(prompt, st.sampled_from([b"", b"s"])), max_size=25), st.integers(1, 30))
def test_the_tree_adds_up_to_what_was_found(served: list[tuple[list[int], bytes]], most: int) -> None:
    blocks, prefixes = BlockManager(256, 2), ReusedPrefixes(2)
    found = [(tokens, salt, hit(prefixes, blocks, tokens, salt)) for tokens, salt in served]
    whole = ReuseTree(list(prefixes), 2, preview=100).best(10_000)
    assert sum(node.tokens_saved for node in whole) == sum(num_hit for _, _, num_hit in found)
    paths: list[tuple[int, ...]] = []
    for node in whole:
        before = () if node.parent is None else paths[node.parent]
        assert len(before) == node.start
        paths.append((*before, *node.tokens))
        assert len(paths[-1]) == node.end
        through = [1 for tokens, _, num_hit in found if tuple(tokens[:num_hit])[: node.end] == paths[-1]]
        assert node.num_hits <= len(through), "of one salt"
    for index, node in enumerate(whole):
        below = [child.num_hits for child in whole if child.parent == index]
        assert sum(below) <= node.num_hits
        assert len(below) != 1 or below[0] < node.num_hits, "a run without a branch is one node"
    few = ReuseTree(list(prefixes), 2, preview=1).best(most)
    assert len(few) <= most
    if whole and most == 1:
        roots = [node.tokens_saved for node in whole if node.parent is None]
        assert few[0].tokens_saved == max(roots)
    assert all(node.parent is None or node.parent < index for index, node in enumerate(few))


def test_reused_prefixes_are_bounded_and_the_latest_stay() -> None:
    blocks, prefixes = BlockManager(256, 2), ReusedPrefixes(2, most_pages=4)
    for first in range(6):
        for _ in range(2):
            hit(prefixes, blocks, [first, 1, 2, 3, 4], b"")
    assert [list(prefix.tokens) for prefix in prefixes] == [[4, 1, 2, 3], [5, 1, 2, 3]]
    hit(prefixes, blocks, [5, 1, 2, 3, 4], b"")
    assert [prefix.num_hits for prefix in prefixes] == [1, 2]
    long = ReusedPrefixes(2, most_pages=1)
    hit(long, blocks, [5, 1, 2, 3, 4], b"")
    assert len(list(long)) == 1, "one that is larger than the memory is kept alone"


def test_a_preview_shows_the_beginning_of_a_run() -> None:
    (node,) = ReuseTree([ReusedPrefix(b"", array("I", range(12)), 3)], 2, preview=5).best(5)
    assert (node.tokens, node.start, node.end, node.tokens_saved) == ((0, 1, 2, 3, 4), 0, 12, 36)


def test_the_number_of_pinned_pages_is_checked() -> None:
    with pytest.raises(InvalidConfig, match="at least 0, got -1"):
        EngineConfig(max_pinned_pages=-1)


def test_pins_must_leave_room_in_the_pool() -> None:
    with pytest.raises(InvalidConfig, match="less than the 64 pages"):
        FakeCore()(small_config(max_pinned_pages=64))
    core = FakeCore()(small_config(max_pinned_pages=63))
    assert (core.capacity, core.cache.totals().policy) == (4, "lru")
