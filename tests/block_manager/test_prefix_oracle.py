from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given

import octavo_lab.policies  # noqa: F401 (registers policies)
from ledger import visible
from octavo.block_manager import BlockManager, Digest, KVGroupSpec, ResidualWindow
from octavo.block_manager.policies import POLICIES
from strategies import page_groups

pytestmark = pytest.mark.property

Prefix = tuple[bytes, tuple[int, ...]]


@dataclass(frozen=True)
class Serve:
    prompt: tuple[int, ...]
    salt: bytes
    share: float
    more: tuple[int, ...]


serves = st.builds(
    Serve,
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=16).map(tuple),
    salt=st.sampled_from([b"", b"", b"other tenant"]),
    share=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
    more=st.sampled_from([(), (), (0,), (1, 1, 1, 0, 1)]),
)


class Oracle:
    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.pools = [group.pool for group in blocks._groups]
        self.findable: list[set[Prefix]] = [set() for _ in self.pools]
        self.prefix_of: dict[Digest, Prefix] = {}
        self.cursors = [1] * len(self.pools)

    def wrote(self, digests: list[Digest], tokens: list[int], positions: range, salt: bytes) -> None:
        size = self.blocks.page_size
        for index in range(positions.start // size, positions.stop // size):
            digest = digests[index]
            prefix = (salt, tuple(tokens[: (index + 1) * size]))
            assert self.prefix_of.setdefault(digest, prefix) == prefix, "two prefixes of one name"
            for spec, findable in zip(self.blocks.groups, self.findable, strict=True):
                if not isinstance(spec, ResidualWindow) or self._sees(spec, (index + 1) * size, index * size):
                    findable.add(prefix)
        self.follow()

    def follow(self) -> None:
        for group, pool in enumerate(self.pools):
            events = pool.events.since(self.cursors[group])
            self.cursors[group] = pool.events.next_number
            removed = [event.digests for event in events if event.kind == "removed"]
            self.findable[group] -= {self.prefix_of[digest] for digests in removed for digest in digests}

    def hit(self, tokens: tuple[int, ...], salt: bytes) -> int:
        size = self.blocks.page_size
        lengths = range((len(tokens) - 1) // size * size, 0, -size)
        return next((length for length in lengths if self._can_go_on(tokens, salt, length)), 0)

    def _can_go_on(self, tokens: tuple[int, ...], salt: bytes, length: int) -> bool:
        size = self.blocks.page_size
        return all(
            (salt, tokens[: start + size]) in findable
            for spec, findable in zip(self.blocks.groups, self.findable, strict=True)
            for start in range(0, length, size)
            if self._sees(spec, length, start)
        )

    def _sees(self, spec: KVGroupSpec, length: int, start: int) -> bool:
        blocks, size = self.blocks, self.blocks.page_size
        return any(
            visible(blocks.groups, spec, length, position, page_size=size)
            for position in range(start, start + size)
        )


@given(
    st.lists(serves, min_size=1, max_size=14),
    st.sampled_from([1, 2, 4]),
    st.data(),
    st.sampled_from([*POLICIES]),
)
def test_published_pages_are_found_until_evicted(
    served: list[Serve], page_size: int, data: st.DataObject, policy: str
) -> None:
    need = max(-(-(len(item.prompt) + len(item.more) + 1) // page_size) for item in served)
    groups = data.draw(page_groups(2 * need, page_size, 2 * need * page_size, spare=6))
    blocks = BlockManager(groups, page_size, policy=policy)
    oracle = Oracle(blocks)
    for item in served:
        prompt = list(item.prompt)
        expected = oracle.hit(item.prompt, item.salt)
        table = blocks.open(prompt, salt=item.salt)
        assert table.num_written == expected
        stop = max(table.num_written, int(len(prompt) * item.share))
        assert blocks.reserve(table, stop)
        oracle.follow()
        blocks.commit(table, prompt, stop)
        oracle.wrote(table.digests, prompt, range(expected, stop), item.salt)
        fork = blocks.fork(table) if item.more else None
        if fork is not None:
            blocks.copied(blocks.take_copies())
            tokens = [*prompt[:stop], *item.more]
            assert blocks.reserve(fork, len(tokens))
            oracle.follow()
            blocks.commit(fork, tokens, len(tokens))
            oracle.wrote(fork.digests, tokens, range(stop, len(tokens)), item.salt)
            blocks.close(fork)
        blocks.close(table)
        oracle.follow()
        blocks.check()
        assert [len(found) for found in oracle.findable] == [pool.num_idle_cached for pool in oracle.pools]


@given(st.lists(serves, min_size=1, max_size=10), st.sampled_from([1, 2, 4]), st.data())
def test_miss_reasons_agree_with_a_model(served: list[Serve], page_size: int, data: st.DataObject) -> None:
    need = max(-(-len(item.prompt) // page_size) for item in served)
    groups = data.draw(page_groups(need, page_size, need * page_size, spare=2))
    blocks = BlockManager(groups, page_size)
    ever: set[Prefix] = set()
    for item in served:
        prompt = list(item.prompt)
        table = blocks.open(prompt, salt=item.salt)
        miss = blocks.explain_miss(table, prompt)
        end = (miss.page + 1) * page_size
        assert miss.page == table.num_written // page_size
        if end >= len(prompt):
            assert miss.reason == ("last_token" if end == len(prompt) else "partial_page")
        else:
            before = (item.salt, item.prompt[:end]) in ever
            assert (miss.reason == "evicted") == before == (miss.evicted_at is not None)
        if miss.reason == "other_salt":
            assert miss.page == 0
            assert any(salt != item.salt and tokens == item.prompt[:end] for salt, tokens in ever)
        assert table.num_written + sum(blocks.miss_reasons.count(len(prompt), miss).values()) == len(prompt)
        assert blocks.reserve(table, len(prompt))
        blocks.commit(table, prompt, len(prompt))
        ever |= {(item.salt, item.prompt[:stop]) for stop in range(page_size, len(prompt) + 1, page_size)}
        blocks.close(table)
