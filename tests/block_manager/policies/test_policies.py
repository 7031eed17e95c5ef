from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import octavo_lab.policies  # noqa: F401 (registers policies)
from octavo.block_manager import BlockManager, Digest, PageId
from octavo.block_manager.kv_group import OutOfWindowFirst
from octavo.block_manager.page_pool import Release
from octavo.block_manager.policies import POLICIES, EvictionPolicy, make_policy


def ids(*pages: int) -> list[PageId]:
    return [PageId(page) for page in pages]


def digests(num_pages: int) -> list[Digest | None]:
    return [Digest(bytes([page])) for page in range(num_pages)]


@pytest.mark.parametrize("name", ["lru", "lfu"])
def test_pages_never_found_go_in_the_order_of_release(name: str) -> None:
    policy = make_policy(name, 6)
    policy.release(ids(3, 2), digests(6))
    policy.release(ids(5, 0), digests(6))
    assert sorted(policy) == ids(0, 2, 3, 5)
    assert policy.evict(3) == ids(3, 2, 5)
    assert (len(policy), list(policy)) == (1, ids(0))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=60), st.sampled_from([*POLICIES]))
def test_every_policy_lists_exactly_the_idle_pages(moves: list[tuple[bool, int]], name: str) -> None:
    lists_the_idle_pages(make_policy(name, 8), moves)
    order = OutOfWindowFirst(make_policy(name, 8))
    lists_the_idle_pages(order, moves, passing=order.release_out_of_window)


def lists_the_idle_pages(
    policy: EvictionPolicy, moves: list[tuple[bool, int]], passing: Release | None = None
) -> None:
    held, idle = set(ids(*range(8))), set[PageId]()
    rng = random.Random(len(moves))
    for frees, count in moves:
        if frees and held:
            pages = rng.sample(sorted(held), min(count, len(held)))
            release = passing if passing is not None and count % 2 else policy.release
            release(pages, digests(8))
            held -= set(pages)
            idle |= set(pages)
        elif idle:
            num_pages = min(count, len(idle))
            if num_pages % 2:
                pages = rng.sample(sorted(idle), num_pages)
                policy.reuse(pages)
            else:
                pages = policy.evict(num_pages)
            held |= set(pages)
            idle -= set(pages)
        assert sorted(policy) == sorted(idle)
        assert len(policy) == len(idle)


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="'fifo'"):
        BlockManager(4, 4, policy="fifo")
