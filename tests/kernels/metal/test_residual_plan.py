from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.metal.plan import chunk_rows
from octavo.kernels.metal.residual import _Kind, _kinds, _routes, _Run
from octavo.kernels.residual import residual_starts

pytestmark = pytest.mark.parity

TILE = 4  # tokens
Reach = tuple[int | None, int]
"""Window of a layer, and the number of first positions that rows read in 16 bits."""


@st.composite
def steps(draw: st.DrawFn) -> tuple[AttentionMetadata, Reach]:
    size = draw(st.sampled_from((1, 2, 4, 8)))
    spans = draw(
        st.lists(
            st.tuples(st.integers(0, 70), st.sampled_from((1, 1, 2, 9, 23))).map(lambda s: (s[0], sum(s))),
            min_size=1,
            max_size=4,
        )
    )
    width = -(-max(stop for _, stop in spans) // size)
    table = np.arange(len(spans) * width, dtype=np.int32).reshape(len(spans), width)
    step = AttentionMetadata.of(spans, table, table, page_size=size)
    after = draw(st.lists(st.sampled_from((0, 0, 5, 30, 200)), min_size=len(spans), max_size=len(spans)))
    window = draw(st.none() | st.integers(1, 60))
    residual = draw(st.integers(1, min(window or 40, 40)))
    keep = draw(st.integers(0, 3)) * size if window is None else draw(st.sampled_from((0, 0, 1, 4, 11, 40)))
    first = residual_starts(step.positions, window=residual, page_size=size)
    starts = np.where(step.positions < np.array(after)[step.row_sequences], 0, first).astype(np.int32)
    pages, shown = step.groups
    return replace(step, groups=(pages, shown._replace(starts=starts))), (window, keep)


def read(step: AttentionMetadata, kind: _Kind, row: int, table: int) -> list[int]:
    keys = np.arange(kind.positions[row] + 1)
    if kind.seen_since is not None:
        keys = keys[(keys >= kind.seen_since[row]) | (keys < kind.keep)]
    size, width = step.page_size, step.groups[0].page_table.shape[1]
    pages = kind.page_table[table, keys // size] - step.row_sequences[row] * width
    return [int(position) for position in pages * size + keys % size]


def wanted(step: AttentionMetadata, reach: Reach, row: int) -> tuple[list[int], list[int]]:
    assert step.groups[1].starts is not None
    window, keep = reach
    position = step.positions[row : row + 1]
    start = step.groups[1].starts[row]
    keys = np.arange(position[0] + 1)
    if window is not None:
        keys = keys[(keys > position[0] - window) | (keys < keep)]
    whole = (keys >= start) | (keys < keep)
    return keys[~whole].tolist(), keys[whole].tolist()


@given(steps())
def test_rows_read_every_position_that_they_see_once(drawn: tuple[AttentionMetadata, Reach]) -> None:
    step, reach = drawn
    kinds = _kinds(step, *reach)
    for row in range(step.num_tokens):
        got = tuple(read(step, kind, row, row) for kind in kinds)
        assert got == wanted(step, reach, row)
        assert [bool(keys) for keys in got] == [bool(kind.live[row]) for kind in kinds]
        for kind in kinds:
            seen = np.arange(kind.positions[row] + 1)
            if kind.seen_since is not None:
                seen = seen[(seen >= kind.seen_since[row]) | (seen < kind.keep)]
            assert kind.tiles[row] == len(np.unique(seen // 32))


@given(steps())
def test_a_tile_reads_one_table_from_its_first_rows_start(drawn: tuple[AttentionMetadata, Reach]) -> None:
    step, reach = drawn
    kinds = _kinds(step, *reach)
    for route in _routes(step, kinds, TILE):
        is_tiled = np.isin(route.rows, chunk_rows(step)).all()
        for kind, run, which in zip(kinds, route.runs, (0, 1), strict=True):
            index, live = np.array(run.index), np.array(run.live)
            parts = _parts(run)
            for at, row in enumerate(route.rows.tolist()):
                want = wanted(step, reach, row)[which]
                assert live[at].any() == bool(want)
                if not is_tiled:
                    assert [parts[part][0] for part in index[at][live[at]]] == [row] * live[at].sum()
                elif want:
                    owner, table, first, last = parts[index[at, 0]]
                    assert owner == row
                    assert read(step, kind, row, table) == want
                    assert kind.positions[row] <= kind.positions[last]
                    if kind.seen_since is not None:
                        assert kind.seen_since[first] <= kind.seen_since[row]


def _parts(run: _Run) -> list[tuple[int, int, int, int]]:
    if run.parts.tiled is None:
        return [(row, table, row, row) for row, table, _, _ in run.parts.plan.tolist()]
    parts: list[tuple[int, int, int, int]] = []
    for first, count, table, out in run.parts.plan.tolist():
        assert out == len(parts)
        parts += [(row, table, first, first + count - 1) for row in range(first, first + count)]
    assert run.parts.tiled == len(parts)
    return parts
