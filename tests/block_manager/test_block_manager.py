from __future__ import annotations

import hashlib
from array import array

import pytest

from ledger import slot_of
from octavo.block_manager import BlockManager, Digest, PageCopy, PageId, PageTable, sha256_chain
from octavo.block_manager import digests as digests_module

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]  # two full pages of 4 tokens, and two more tokens


def written(blocks: BlockManager, tokens: list[int], salt: bytes = b"") -> PageTable:
    table = blocks.open(tokens, salt=salt)
    assert blocks.reserve(table, len(tokens))
    blocks.commit(table, tokens, len(tokens))
    return table


def test_a_new_prompt_gets_pages_in_order() -> None:
    blocks = BlockManager(8, 4)
    table = written(blocks, PROMPT)
    assert table.pages == array("i", [0, 1, 2])
    assert [slot_of(table, position) for position in (0, 3, 4, 9)] == [0, 3, 4, 9]
    assert table.capacity == 12
    assert len(table.digests) == 2
    assert (blocks.counts.held, blocks.counts.idle_cached, blocks.counts.idle_empty) == (3, 0, 5)


def test_without_the_cache_nothing_is_found_and_nothing_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_hashing(_parent: Digest, _packed: bytes, _page_bytes: int) -> list[Digest]:
        raise AssertionError("hashed")

    monkeypatch.setattr(digests_module, "sha256_chain", no_hashing)
    blocks = BlockManager(8, 4, prefix_cache=False)
    blocks.close(written(blocks, PROMPT))
    assert blocks.open(PROMPT).num_written == 0
    assert blocks.counts.idle_cached == 0


def test_empty_then_least_recently_used_pages_are_reused() -> None:
    blocks = BlockManager(5, 4)
    old, new = written(blocks, [1] * 8), written(blocks, [2] * 8)
    head, tail = old.pages
    blocks.close(old)
    blocks.close(new)
    taker = blocks.open([3] * 12)
    assert blocks.reserve(taker, 4)
    assert list(taker.pages) == [4], "the page that was never used"
    assert blocks.reserve(taker, 12)
    assert list(taker.pages[1:]) == [tail, head], "the older prompt, its tail first"
    assert blocks.num_evicted == 2
    assert blocks.open([1] * 8).num_written == 0
    assert blocks.open([2] * 8).num_written == 4


def test_a_page_is_not_found_without_the_one_before_it() -> None:
    tokens = [1, 1, 1, 1, 2, 2, 2, 2]
    blocks = BlockManager(4, 4)
    short, long = blocks.open(tokens), blocks.open(tokens)
    for table, num_tokens in ((short, 4), (long, 8)):
        assert blocks.reserve(table, num_tokens)
        blocks.commit(table, tokens, num_tokens)
    blocks.close(short)
    assert blocks.reserve(blocks.open([3]), 8)
    assert blocks.num_evicted == 1
    assert blocks.open([*tokens, 9]).num_written == 0


def test_a_fork_shares_full_pages_and_copies_the_partial_one() -> None:
    blocks = BlockManager(8, 4)
    table = written(blocks, PROMPT)
    fork = blocks.fork(table)
    assert fork is not None
    assert fork.pages == array("i", [0, 1, 3])
    copies = blocks.take_copies()
    assert copies == (PageCopy(PageId(table.pages[2]), PageId(fork.pages[2])),)
    assert fork.num_written == 10
    blocks.copied(copies)
    longer = [*PROMPT, 11, 12]
    blocks.commit(fork, longer, 12)
    blocks.check()
    assert blocks.open([*longer, 13]).pages == fork.pages, "the fork publishes its own page"


def test_a_copy_holds_both_pages_until_it_is_done() -> None:
    blocks = BlockManager(8, 4)
    table = written(blocks, PROMPT[:2])
    fork = blocks.fork(table)
    assert fork is not None
    (copy,) = blocks.take_copies()
    blocks.close(table)
    blocks.close(fork)
    assert blocks.counts.held == 2
    blocks.copied([copy])
    assert blocks.counts.held == 0


def test_a_copy_that_no_step_has_taken_ends_with_its_table() -> None:
    blocks = BlockManager(8, 4)
    table = written(blocks, PROMPT[:2])
    fork = blocks.fork(table)
    assert fork is not None
    blocks.close(fork)
    assert not blocks.has_copies
    assert blocks.counts.held == 1
    blocks.check()


def test_rollback_into_a_published_page_continues_on_a_copy() -> None:
    """A published page may be found at any time, so its contents must match its digest."""
    blocks = BlockManager(8, 4)
    table = written(blocks, PROMPT)
    blocks.rollback(table, 6)
    (copy,) = blocks.take_copies()
    assert copy == PageCopy(source=PageId(1), target=PageId(2)), "the freed tail page is used at once"
    assert list(table.pages) == [0, 2]
    assert len(table.digests) == 1
    blocks.copied([copy])
    blocks.commit(table, [1, 2, 3, 4, 5, 6, 70, 80], 8)
    blocks.check()
    assert list(blocks.open(PROMPT).pages) == [0, 1]
    assert list(blocks.open([1, 2, 3, 4, 5, 6, 70, 80, 90]).pages) == [0, 2]


def test_known_digests_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counting(parent: Digest, packed: bytes, page_bytes: int) -> list[Digest]:
        digests = sha256_chain(parent, packed, page_bytes)
        hashed.append(len(digests))
        return digests

    monkeypatch.setattr(digests_module, "sha256_chain", counting)
    blocks = BlockManager(8, 4)
    table = written(blocks, PROMPT)
    assert sum(hashed) == 2
    for length in range(11, 17):
        tokens = [*PROMPT, *range(11, length + 1)]
        assert blocks.reserve(table, length)
        blocks.commit(table, tokens, length)
    assert sum(hashed) == 4, "one digest per new page of a growing sequence"
    blocks.close(table)
    assert blocks.open(tokens, digests=table.digests).num_written == 12
    assert sum(hashed) == 4, "and none when it comes back"


@pytest.mark.parametrize(
    ("num_tokens", "num_hit", "misses"),
    [
        (10, 0, {"new": 8, "partial_page": 2}),
        (10, 8, {"partial_page": 2}),
        (8, 4, {"last_token": 4}),
        (8, 0, {"new": 4, "last_token": 4}),
        (1, 0, {"partial_page": 1}),
    ],
)
def test_misses_are_counted(num_tokens: int, num_hit: int, misses: dict[str, int]) -> None:
    blocks = BlockManager(8, 4)
    written(blocks, PROMPT[:num_hit])
    table = blocks.open(PROMPT[:num_tokens])
    miss = blocks.explain_miss(table, PROMPT[:num_tokens])
    assert (miss.page, miss.reason) == (num_hit // 4, next(iter(misses)))
    assert blocks.miss_reasons.count(num_tokens, miss) == misses


def test_flushing_forgets_idle_pages_and_no_others() -> None:
    blocks = BlockManager(8, 4)
    held = written(blocks, PROMPT)
    blocks.close(written(blocks, [7] * 8))
    assert blocks.flush() == 2
    assert blocks.counts.idle_cached == blocks.num_evicted == 0
    assert blocks.open([7] * 8).num_written == 0
    assert blocks.open(PROMPT).pages == held.pages[:2]
    blocks.check()


def test_page_digests_are_chained_sha256() -> None:
    """Later versions must find pages that were stored under these digests."""
    blocks = BlockManager(8, 2)
    table = written(blocks, [1, 2, 3, 4], salt=b"s")
    digest = hashlib.sha256(b"octavo pages\0s").digest()
    for page in (b"\1\0\0\0\2\0\0\0", b"\3\0\0\0\4\0\0\0"):
        digest = hashlib.sha256(digest + page).digest()
    assert table.digests[-1] == digest


@pytest.mark.parametrize("arguments", [(0, 4), (4, 0)])
def test_a_pool_needs_pages_and_pages_need_positions(arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        BlockManager(*arguments)


def test_check_notices_a_broken_book() -> None:
    """Other tests rely on ``check``, so it must be able to fail."""
    blocks = BlockManager(8, 4)
    table = written(blocks, PROMPT)
    blocks.check()
    table.pages.append(0)
    with pytest.raises(AssertionError, match="page 0"):
        blocks.check()
