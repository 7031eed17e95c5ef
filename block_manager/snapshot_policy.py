"""The choice of snapshots of recurrent state to take; ``snapshot_order.py`` decides which to evict.

A state may be as large as the K/V of hundreds of tokens, so a snapshot at every page would use up the memory.
Two kinds are taken of each sequence:

tail       at the last full page, where the next turn of a conversation begins. A decoding sequence has
           one tail, which moves from page to page
junction   where cached pages reach further than snapshots: the common prefix of several prompts

If a slot is no bigger than a page, every page gets a snapshot.
"""

from __future__ import annotations


def wanted_snapshots(
    start: int,
    stop: int,
    *,
    page_size: int,
    junction: int,
    every_page: bool,
    num_known: int,
    with_tail: bool = True,
) -> list[int]:
    """Return after how many full pages a state is worth keeping.

    The step computes positions [start, stop). ``junction``: number of pages found (0: no snapshot is wanted
    there); ``num_known``: tokens of the sequence so far; ``with_tail``: whether a snapshot at its last full
    page is wanted.
    """
    first, last = start // page_size + 1, stop // page_size  # full pages after the step's first token
    if every_page:
        return list(range(first, last + 1))
    pages = {junction} if first <= junction <= last else set()
    tail = num_known // page_size  # the last step of a prompt may begin after it
    if with_tail and first <= tail <= last:
        pages.add(tail)
    return sorted(pages)
