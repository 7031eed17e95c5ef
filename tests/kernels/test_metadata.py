from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.kernels.metadata import AttentionMetadata, GroupMetadata


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


GOOD = AttentionMetadata(  # a decode at position 5 and a chunk of three, pages of 4 tokens
    positions=ints(5, 0, 1, 2),
    q_start=ints(0, 1, 4),
    kv_len=ints(6, 3),
    groups=(GroupMetadata(slots=ints(9, 12, 13, 14), page_table=np.array([[1, 2], [3, 0]], np.int32)),),
    page_size=4,
)


def test_a_good_step_passes_and_counts_itself() -> None:
    GOOD.check(4)
    assert (GOOD.num_tokens, GOOD.num_sequences) == (4, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": ints(9, 12, 13, 16)}, r"slots must lie in \[0, 16\), got values from 9 to 16"),
        ({"slots": ints(-1, 12, 13, 14)}, "slots must lie in"),
        ({"page_table": np.array([[1, 4], [3, 0]], np.int32)}, r"page_table must lie in \[0, 4\)"),
        ({"page_table": np.array([[1, -2], [3, 0]], np.int32)}, "page_table must lie in"),
        ({"kv_len": ints(9, 3)}, r"kv_len must lie in \[0, 9\)"),
        ({"q_start": ints(0, 1, 3)}, "q_start must rise from 0 to 4"),
        ({"q_start": ints(1, 2, 4)}, "q_start must rise from 0 to 4"),
        ({"q_start": ints(0, 0, 4)}, "q_start must rise from 0 to 4"),
        ({"q_start": ints(0, 5, 4)}, "q_start must rise from 0 to 4"),
        ({"q_start": ints(2_000_000_000, -2_000_000_000, 4)}, "q_start must rise from 0 to 4"),
        ({"q_start": ints(0, 4)}, r"q_start must be int32 \(3,\)"),
        ({"positions": ints(6, 0, 1, 2)}, "row 0 is at position 6, its sequence ends before 6"),
        ({"positions": ints(5, 0, 1, 3)}, "row 3 is at position 3, its sequence ends before 3"),
        ({"positions": ints(5, -1, 1, 2)}, "row 1 is at position -1"),
        ({"positions": np.array([5, 0, 1, 2])}, r"positions must be int32 \(4,\), got int64"),
        ({"last": ints(5, 1, 1, 3)}, "last must lie from a row's position"),
        ({"slots": ints(9, 12, 13)}, r"slots must be int32 \(4,\)"),
        ({"page_table": ints(1, 2)}, "page_table must be int32"),
        ({"starts": ints(7, 0, 0, 0)}, r"starts must lie in \[0, 7\)"),
        ({"starts": ints(0, -1, 0, 0)}, "starts must lie in"),
    ],
)
def test_an_index_that_leads_outside_is_refused(change: dict[str, Any], message: str) -> None:
    shared = {name: value for name, value in change.items() if name not in GroupMetadata._fields}
    group = {name: value for name, value in change.items() if name not in shared}
    wrong = replace(GOOD, **shared, groups=(GOOD.groups[0]._replace(**group),))
    with pytest.raises(ValueError, match=message):
        wrong.check(4)


def test_a_step_of_several_groups_is_one_of_any_of_them() -> None:
    other = GOOD.groups[0]._replace(slots=ints(1, 4, 5, 6))
    both = replace(GOOD, groups=(*GOOD.groups, other))
    assert both.select((1,)).only_group() is other
    assert both.select((1, 0)).groups == (other, GOOD.groups[0])
    assert both.row_sequences.tolist() == [0, 1, 1, 1]
    with pytest.raises(ValueError, match="needs metadata of one group, got 2"):
        both.check(4)


def test_an_empty_step_is_refused() -> None:
    empty = AttentionMetadata(
        positions=ints(),
        q_start=ints(0),
        kv_len=ints(),
        groups=(GroupMetadata(slots=ints(), page_table=np.zeros((0, 1), np.int32)),),
        page_size=4,
    )
    with pytest.raises(ValueError, match="at least one token"):
        empty.check(4)


def test_a_step_follows_from_its_spans_and_the_pages_of_its_sequences() -> None:
    table = GOOD.groups[0].page_table
    made = AttentionMetadata.of([(5, 6), (0, 3)], table, table[::-1], page_size=4)
    assert [array.tolist() for array in (made.positions, made.q_start, made.kv_len)] == [
        [5, 0, 1, 2],
        [0, 1, 4],
        [6, 3],
    ]
    assert [group.slots.tolist() for group in made.groups] == [[9, 12, 13, 14], [1, 4, 5, 6]]
    assert made.groups[1].page_table.tolist() == [[3, 0], [1, 2]]
    for index in range(2):
        made.select((index,)).check(4)
