"""Compressed snapshots: what they take, what they give back, and what passes through unchanged."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from octavo.engine.api.config import StateSnapshots
from octavo.engine.executor.recurrent.entries import EntrySpec, slot_bytes
from octavo.engine.executor.recurrent.snapshot_store import SnapshotStore, snapshot_bytes

ENTRIES = {"recurrence": EntrySpec((4, 16, 32), mx.float32), "conv": EntrySpec((3, 8), mx.bfloat16)}


def states(count: int) -> dict[str, mx.array]:
    rng = np.random.default_rng(count)
    rows = rng.standard_normal((count, 4, 16, 32)) * np.exp(3 * rng.standard_normal((count, 4, 16, 1)))
    rows[0, 0, 0] = 0
    return {
        "recurrence": mx.array(rows.astype(np.float32)),
        "conv": mx.array(rng.standard_normal((count, 3, 8))).astype(mx.bfloat16),
    }


@pytest.mark.parametrize(("form", "limit", "part"), [("bf16", 2**-8, 0.52), ("int8", 0.5 / 127, 0.3)])
def test_each_row_is_rounded_once(form: StateSnapshots, limit: float, part: float) -> None:
    """Of each row's largest value, at most ``limit``; windows keep their bits."""
    store, given = SnapshotStore(5, ENTRIES, form), states(2)
    store.put([4, 1], given, [64, 96])
    assert store.nbytes == 5 * store.num_bytes
    assert store.num_bytes == snapshot_bytes(ENTRIES, form) <= part * slot_bytes(ENTRIES)
    got = store.get([4, 1])
    assert store.positions([4, 1]) == [64, 96]
    before, after = (np.array(x["recurrence"]) for x in (given, got))
    assert (np.abs(after - before).max(-1) <= limit * np.abs(before).max(-1) * 1.001).all()
    assert not np.array_equal(after, before)
    assert mx.array_equal(got["conv"], given["conv"])
    again = SnapshotStore(5, ENTRIES, form)
    again.put([0, 3], got, [64, 96])
    assert form != "bf16" or mx.array_equal(again.get([0, 3])["recurrence"], got["recurrence"]), (
        "rounded twice"
    )


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_bytes_are_the_same_elsewhere(form: StateSnapshots) -> None:
    one, two = SnapshotStore(3, ENTRIES, form), SnapshotStore(4, ENTRIES, form)
    one.put([2, 0], states(2), [32, 64])
    data = one.read([2, 0])
    assert data.shape == (2, one.num_bytes)
    two.write([3, 1], data, [32, 64])
    for name, rows in one.get([2, 0]).items():
        assert mx.array_equal(two.get([3, 1])[name], rows)
    assert two.positions([3, 1]) == [32, 64]
    assert two.described == one.described
