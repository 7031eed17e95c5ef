from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import Ledger
from octavo.block_manager import BlockManager, Digest, digests, sha256_chain
from octavo.block_manager.digests import pack, unpack
from octavo.block_manager.events import MAX_DIGESTS, EventLog
from octavo.block_manager.page_index import parents_first
from octavo.block_manager.page_pool import PagePool
from octavo.block_manager.policies import make_policy

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def serve(blocks: BlockManager, tokens: list[int], salt: bytes = b"") -> list[Digest]:
    table = blocks.open(tokens, salt=salt)
    assert blocks.reserve(table, len(tokens))
    blocks.commit(table, tokens, len(tokens))
    blocks.close(table)
    return table.digests


@given(st.lists(prompts, max_size=3), st.lists(prompts, max_size=12), st.integers(6, 12))
def test_contents_are_those_of_the_pages_that_can_be_found(
    before: list[list[int]], after: list[list[int]], num_pages: int
) -> None:
    blocks = BlockManager(num_pages, 2)
    prefix_of: dict[Digest, tuple[int, ...]] = {}

    def serve_one(prompt: list[int]) -> None:
        for index, digest in enumerate(serve(blocks, prompt)):
            prefix_of[digest] = tuple(prompt[: 2 * index + 2])

    for prompt in before:
        serve_one(prompt)
    log = blocks.events
    assert (len(blocks.page_index), log.tokens_since) == (0, None)
    assert all(event.contents == () or event.contents == [] for event in log.since(1))
    blocks.keep_tokens()
    findable: set[Digest] = set()
    cursor = log.next_number
    for prompt in after:
        serve_one(prompt)
        for event in log.since(cursor):
            cursor += 1
            if event.kind == "stored":
                assert [unpack(packed) for packed in event.contents] == [
                    list(prefix_of[digest][-2:]) for digest in event.digests
                ]
                findable |= set(event.digests)
            else:
                findable -= set(event.digests)
        told = dict(parents_first(blocks.cached_contents()))
        assert all(blocks.find(digest) is not None for digest in told), "only what can be found"
        if not before:
            assert set(told) == findable
    known: dict[Digest, tuple[int, ...]] = {}
    for digest, (packed, parent, salt) in parents_first(blocks.cached_contents()):
        assert salt == b""
        assert digest not in known, "once each"
        known[digest] = (() if parent is None else known[parent]) + tuple(unpack(packed))
        assert known[digest] == prefix_of[digest], "parents before children"
    roots = {digest for digest in findable if len(prefix_of[digest]) == 2}
    assert roots <= known.keys(), "only what follows a page of unknown tokens may be unknown"
    assert len(blocks.page_index) <= 2 * num_pages * 2, "bounded"
    blocks.flush()
    assert blocks.cached_contents() == {}


def test_pages_after_one_that_is_not_known_are_left_out() -> None:
    blocks = BlockManager(8, 2)
    serve(blocks, [1, 2])
    blocks.keep_tokens()
    serve(blocks, [1, 2, 3, 4])
    serve(blocks, [5, 6, 7, 8])
    assert len(blocks.page_index) == 3
    assert [unpack(page.tokens) for _, page in parents_first(blocks.cached_contents())] == [[5, 6], [7, 8]]


def test_pages_between_ones_that_are_found_already_keep_their_own_tokens() -> None:
    pool = PagePool(8, make_policy("lru", 8))
    names = [Digest(bytes([number])) for number in range(5)]
    taken = pool.allocate(7)
    assert taken is not None
    pool.publish(taken[:2], [names[0], names[3]], None, contents=[b"0", b"3"])
    pool.publish(taken[2:], names, None, contents=[b"0", b"1", b"2", b"3", b"4"])
    told: dict[Digest, bytes] = {}
    parents: dict[Digest, Digest | None] = {}
    for event in pool.events.since(1):
        parent = event.parent
        for digest, tokens in zip(event.digests, event.contents, strict=True):
            told[digest], parents[digest], parent = tokens, parent, digest
    assert told == {names[number]: str(number).encode() for number in range(5)}
    assert (parents[names[1]], parents[names[2]], parents[names[4]]) == (names[0], names[1], names[3])


def test_many_removed_pages_are_several_events() -> None:
    log = EventLog(10 * MAX_DIGESTS)
    log.add_removed([Digest(b"x")] * (2 * MAX_DIGESTS + 1))
    assert [len(event.digests) for event in log.since(1)] == [MAX_DIGESTS, MAX_DIGESTS, 1]
    log.add_removed([])
    assert log.next_number == 4, "nothing removed is no event"


def test_a_limit_returns_the_first_pages() -> None:
    log = EventLog(100)
    for _ in range(10):
        log.add_removed([Digest(b"x")])
    assert [event.number for event in log.since(4, 3)] == [4, 5, 6]
    assert log.since(4, 0) == []
    assert [event.number for event in log.since(9, 30)] == [9, 10]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=8))
def test_packed_tokens_return(tokens: list[int]) -> None:
    assert unpack(pack(tokens)) == tokens


def test_with_colliding_digests_the_ledger_would_see_wrong_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_with_ledger()
    monkeypatch.setattr(digests, "sha256_chain", one_of_two)
    with pytest.raises(AssertionError, match="found"):
        serve_with_ledger()


def one_of_two(parent: Digest, packed: bytes, page_bytes: int) -> list[Digest]:
    return [Digest(bytes([digest[0] % 2]) * 32) for digest in sha256_chain(parent, packed, page_bytes)]


def serve_with_ledger() -> None:
    blocks, ledger = BlockManager(64, 2), Ledger(2)
    for number in range(20):
        tokens = [number, 1, 2, number, 5]
        table = blocks.open(tokens)
        ledger.check(table, tokens, table.num_written)
        assert blocks.reserve(table, len(tokens))
        ledger.write(table, tokens, range(table.num_written, len(tokens)))
        blocks.commit(table, tokens, len(tokens))
        blocks.close(table)
