from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from native import require_extension
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata

pytestmark = pytest.mark.property

_ext = require_extension()

NUM_PAGES, PAGE_SIZE = 4, 8


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    kv_len = [draw(st.integers(count, 2 * PAGE_SIZE)) for count in counts]
    arrays: dict[str, Any] = {
        "positions": [p for n, end in zip(counts, kv_len, strict=True) for p in range(end - n, end)],
        "slots": [draw(st.integers(0, NUM_PAGES * PAGE_SIZE - 1)) for _ in range(sum(counts))],
        "q_start": np.cumsum([0, *counts]).tolist(),
        "kv_len": kv_len,
        "page_table": [[draw(st.integers(0, NUM_PAGES - 1)) for _ in range(2)] for _ in counts],
    }
    step = {name: np.array(values, np.int32) for name, values in arrays.items()}
    if draw(st.booleans()):
        changed = step[draw(st.sampled_from(sorted(step)))].reshape(-1)
        changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(-2, NUM_PAGES * PAGE_SIZE + 1))
    return step


def pack(step: dict[str, Any], *, starts: Any = None, width: int = 2) -> Any:
    rows, sequences = len(step["positions"]), len(step["kv_len"])
    packed: Any = np.full(3 * rows + (2 + width) * sequences + 1, -7, np.int32)
    sizes = {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES}
    if _ext.pack_indices(packed, **step, starts=starts, **sizes):
        return packed
    assert (packed == -7).all(), "nothing is written of a step that is refused"
    return None


def agrees(step: dict[str, Any]) -> bool:
    native = pack(step) is not None
    try:
        shared = {name: step[name] for name in ("positions", "q_start", "kv_len")}
        group = GroupMetadata(slots=step["slots"], page_table=step["page_table"])
        AttentionMetadata(**shared, groups=(group,), page_size=PAGE_SIZE).check(NUM_PAGES)
        right = True
    except ValueError:
        right = False
    assert native == right
    return right


@given(steps())
def test_native_and_python_agree(step: dict[str, Any]) -> None:
    agrees(step)


RIGHT = {
    "positions": np.array([3, 4], np.int32),
    "slots": np.array([3, 4], np.int32),
    "q_start": np.array([0, 2], np.int32),
    "kv_len": np.array([5], np.int32),
    "page_table": np.array([[1, 0]], np.int32),
}


def test_every_sequence_has_a_row() -> None:
    both = {name: np.concatenate([RIGHT[name]] * 2) for name in ("kv_len", "page_table")}
    assert agrees(RIGHT | both | {"q_start": np.array([0, 1, 2], np.int32)})
    for ends in ([0, 2, 2], [0, 0, 2]):
        assert not agrees(RIGHT | both | {"q_start": np.array(ends, np.int32)})


def test_other_types_and_gaps_are_left_to_python() -> None:
    wide = np.array(RIGHT["slots"], np.int64)
    assert pack(RIGHT | {"slots": wide}) is None


@given(steps(), st.integers(2, 9), st.booleans())
def test_numbers_are_packed_one_array_after_the_other(
    step: dict[str, Any], width: int, given_starts: bool
) -> None:
    rows, sequences = len(step["positions"]), len(step["kv_len"])
    starts = np.arange(1, rows + 1, dtype=np.int32) if given_starts else None
    if (packed := pack(step, starts=starts, width=width)) is None:
        return
    table = np.zeros((sequences, width), np.int32)
    table[:, :2] = step["page_table"]
    zeros = np.zeros(rows, np.int32)
    parts = [
        step["slots"],
        step["q_start"],
        step["kv_len"],
        table.reshape(-1),
        zeros if starts is None else starts,
    ]
    assert packed.tolist() == np.concatenate([*parts, zeros]).tolist()


@pytest.mark.parametrize("size", [0, 8, 10, 12, 100])
def test_a_table_has_space_or_is_refused(size: int) -> None:
    packed = np.zeros(size, np.int32)
    wider = {"page_table": np.zeros((1, 3), np.int32)}

    def pack_into() -> bool:
        others = {"starts": None, "page_size": PAGE_SIZE, "num_pages": NUM_PAGES}
        return bool(_ext.pack_indices(packed, **RIGHT | wider, **others))

    if size >= 12:
        assert pack_into()
    else:
        with pytest.raises(ValueError, match=rf"space for a table of at least 3 columns, got {size} numbers"):
            pack_into()


def test_starts_belong_to_rows() -> None:
    assert pack(RIGHT, starts=np.array([0, 4], np.int32)) is not None
    assert pack(RIGHT, starts=np.array([0], np.int32)) is None
    assert pack(RIGHT, starts=np.array([0, 4], np.int64)) is None
