from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.block_manager import BlockManager, Miss
from octavo.engine.inspection import reused_prefixes
from octavo.engine.inspection.lookup_history import LookupHistory
from octavo.engine.inspection.reused_prefixes import ReusedPrefixes
from octavo.scheduler import Lookup, Sequence, Status


def lookup(tokens: list[int], num_hit: int = 0) -> Lookup:
    sequence = Sequence("s", tokens, 4)
    return Lookup(sequence, len(tokens), num_hit, {"new": len(tokens) - num_hit}, Miss(0, "new"))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=30))
def test_tokens_of_ended_requests_are_bounded(requests: list[tuple[int, int]]) -> None:
    memory = LookupHistory(max_requests=8, max_tokens=10)
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
def test_saved_tokens_of_prefixes_add_up_to_hits(served: list[tuple[list[int], bytes]], most: int) -> None:
    blocks, prefixes = BlockManager(256, 2), ReusedPrefixes(2)
    found = [(salt, hit(prefixes, blocks, tokens, salt)) for tokens, salt in served]
    whole = prefixes.best(b"", 10_000)
    assert sum(each.tokens_saved for each in whole) == sum(num_hit for _, num_hit in found)
    own = prefixes.best(b"s", 10_000)
    assert sum(each.tokens_saved for each in own) == sum(num_hit for salt, num_hit in found if salt == b"s")
    saved = sorted((each.tokens_saved for each in whole), reverse=True)
    assert [each.tokens_saved for each in prefixes.best(b"", most)] == saved[:most]


def test_reused_prefixes_are_bounded_and_the_latest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reused_prefixes, "MOST_PREFIXES", 2)
    blocks, prefixes = BlockManager(256, 2), ReusedPrefixes(2)
    for first in (0, 1, 2, 3, 4, 5, 5):
        for _ in range(2):
            hit(prefixes, blocks, [first, 1, 2, 3, 4], b"")
    shown = [(each.preview, each.num_hits) for each in prefixes.best(b"", 10)]
    assert shown == [((5, 1, 2, 3), 3), ((4, 1, 2, 3), 1)]
