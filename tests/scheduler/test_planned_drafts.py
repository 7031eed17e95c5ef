from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.block_manager import BlockManager
from octavo.scheduler import Limits, Scheduler, Sequence
from octavo.scheduler.drafts import NUM_ROWS
from steps import advance, plan


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12))
def test_steps_have_few_numbers_of_drafts_and_lose_the_ends_of_the_longest(lengths: list[int]) -> None:
    scheduler = Scheduler(BlockManager(200, 8), Limits(max_step_tokens=256, max_running=16))
    sequences = [Sequence(f"s{i}", [i, i, i], 100) for i in range(len(lengths))]
    for sequence in sequences:
        scheduler.add(sequence)
    advance(scheduler)
    scheduler.drafts = {
        sequence: tuple(range(length)) for sequence, length in zip(sequences, lengths, strict=True) if length
    }
    step = plan(scheduler)
    counts = [len(item.drafts) for item in step.work]
    total, asked = sum(counts), sum(lengths)
    assert total == max((number for number in NUM_ROWS if number <= asked), default=0)
    for item, length, count in zip(step.work, lengths, counts, strict=True):
        assert item.drafts == tuple(range(count)), "the first ones are the likeliest"
        assert count == length or count >= max(counts) - 1, "the longest lose first"


def test_nothing_is_guessed_while_a_decode_waits_for_a_page() -> None:
    """Drafts would take the page that an older sequence releases in this step."""
    scheduler = Scheduler(BlockManager(5, 2), Limits(max_step_tokens=16, max_running=2))
    older, younger = Sequence("older", [1, 2, 3], 6), Sequence("younger", [4, 5, 6], 6)
    for sequence in (older, younger):
        scheduler.add(sequence)
    for _ in range(2):
        advance(scheduler)
    scheduler.drafts = dict.fromkeys((older, younger), (7, 7))
    step = plan(scheduler)
    assert [(item.sequence, item.drafts) for item in step.work] == [(older, ())]
