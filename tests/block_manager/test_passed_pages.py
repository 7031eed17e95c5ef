from __future__ import annotations

import pytest

import octavo_lab.policies  # noqa: F401 (registers policies)
from octavo.block_manager import (
    BlockManager,
    FullAttention,
    KVGroupSpec,
    PageId,
    ResidualWindow,
    SlidingWindow,
)
from octavo.block_manager.kv_group import OutOfWindowFirst
from octavo.block_manager.policies import make_policy

SIZE = 4
FULL = FullAttention(num_pages=400)


def ids(*pages: int) -> list[PageId]:
    return [PageId(page) for page in pages]


def prompt(number: int, pages: int = 10) -> list[int]:
    return [1000 * number + i for i in range(pages * SIZE + 1)]


def serve(blocks: BlockManager, tokens: list[int]) -> int:
    table = blocks.open(tokens)
    found = table.num_written
    while table.num_written < len(tokens):
        stop = min(table.num_written + 2 * SIZE, len(tokens))
        assert blocks.reserve(table, stop)
        blocks.commit(table, tokens, stop)
    blocks.close(table)
    blocks.check()
    return found


GROUPS = [
    ResidualWindow(num_pages=14, window=SIZE + 1, residual_of=0),
    SlidingWindow(num_pages=14, window=SIZE + 1),
]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_every_prompt_is_found_again_at_its_end(group: KVGroupSpec, policy: str) -> None:
    blocks = BlockManager((FULL, group), SIZE, max_chunk=2 * SIZE, policy=policy)
    prompts = [prompt(number) for number in range(4)]
    assert [serve(blocks, tokens) for tokens in prompts] == [0, 0, 0, 0]
    # Forty pages passed through a pool of fourteen; the last two pages of each prompt are left.
    assert [serve(blocks, tokens) for tokens in prompts] == [40, 40, 40, 40]


@pytest.mark.parametrize("group", GROUPS)
def test_a_second_sequence_shows_where_prefixes_diverge(group: KVGroupSpec) -> None:
    blocks = BlockManager((FULL, group), SIZE, max_chunk=2 * SIZE)
    beginning = prompt(9)[: 5 * SIZE]
    others = iter(range(10, 20))

    def one_more() -> int:
        found = serve(blocks, beginning + prompt(next(others)))
        for _ in range(2):
            serve(blocks, prompt(next(others)))
        return found

    assert one_more() == 0
    assert one_more() == 0, "nobody knew that a sequence would part there"
    assert one_more() == 5 * SIZE, "the second one did: there were pages of the first up to there"


def test_a_fork_knows_where_its_sequence_diverged() -> None:
    blocks = BlockManager((FULL, GROUPS[0]), SIZE, max_chunk=2 * SIZE)
    serve(blocks, prompt(1))
    table = blocks.open([*prompt(1)[: 4 * SIZE], *prompt(2)])
    fork = blocks.fork(table)
    assert fork is not None
    assert fork.branch_points == table.branch_points == (4, 4)


def test_passed_pages_are_evicted_first() -> None:
    order = OutOfWindowFirst(make_policy("lru", 8))
    order.release(ids(0, 1), [None] * 8)
    order.release_out_of_window(ids(2, 3, 4), [None] * 8)
    assert (len(order), sorted(order)) == (5, ids(0, 1, 2, 3, 4))
    order.reuse(ids(3, 1))
    assert order.evict(3) == ids(2, 4, 0)
    assert not len(order)
