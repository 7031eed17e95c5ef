from __future__ import annotations

from typing import Any, cast

from octavo.block_manager import Digest
from octavo.scheduler import Sequence
from octavo.scheduler.waiting.cached_lengths import HASHED_TOKENS, LOOKUPS, CachedLengths

PAGE_SIZE = 4


class Blocks:
    page_size = PAGE_SIZE
    prefix_cache = True

    def __init__(self) -> None:
        self.asked: list[int] = []

    def page_digests(self, tokens: list[int], known: list[Digest], **_: object) -> list[Digest]:
        self.asked.append(tokens[0])
        known[:] = [Digest(b"")] * (len(tokens) // PAGE_SIZE)
        return known

    def num_findable(self, digests: list[Digest]) -> int:
        return len(digests)


def looked_up(waiting: list[Sequence]) -> tuple[CachedLengths, list[list[int]]]:
    blocks = Blocks()
    lengths, steps = CachedLengths(cast(Any, blocks)), []
    for _ in range(3):
        lengths.refresh(waiting)
        steps.append(blocks.asked)
        blocks.asked = []
    return lengths, steps


def test_new_prompts_are_looked_up_first_and_the_others_in_turn() -> None:
    waiting = [Sequence("", [number] * PAGE_SIZE, 1) for number in range(LOOKUPS + 4)]
    lengths, steps = looked_up(waiting)
    new, others = list(range(LOOKUPS, LOOKUPS + 4)), list(range(LOOKUPS))
    assert steps == [others, [*new, *others[:-4]], [*others[-4:], *new, *others[:-8]]]
    assert lengths.of(waiting[0]) == PAGE_SIZE
    lengths.forget(waiting[0])
    assert lengths.of(waiting[0]) == 0


def test_one_long_prompt_is_hashed_per_step() -> None:
    waiting = [Sequence("", [number] * HASHED_TOKENS, 1) for number in range(3)]
    assert looked_up(waiting)[1] == [[0], [1, 0], [2, 1, 0]]
