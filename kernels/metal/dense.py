"""Long prompts through MLX's own attention: an option, for chips whose matrix units it uses.

Once per layer one launch dequantizes what the step's long prompts see into dense K and V
(sources/dense.metal); ``mx.fast.scaled_dot_product_attention`` then attends to them, sequence by sequence. It
sums in an order of its own choice, so a row's bits depend on the rows that are computed with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..interface import LayerSpec
from ..metadata import AttentionMetadata, Ints
from ..visibility import visible, window_start
from .launch import padded

FUSED_DIMS = (64, 80, 128)
"""Head dims for which MLX has a kernel that does not store all logits."""

FEWEST_ROWS = 9
"""With fewer rows MLX takes another kernel, which reads K and V once per query head."""

RUN_KEYS = 32


def may_be_dense(layer: LayerSpec) -> bool:
    """Whether MLX's attention does all that queries of the layer need; what a call asks for comes on top."""
    return layer.head_dim == layer.value_dim and layer.head_dim in FUSED_DIMS and not layer.chunked


def dense_sequences(metadata: AttentionMetadata, fewest: int) -> Ints:
    """The step's sequences with ``fewest`` rows or more, which are their last positions; none for 0."""
    counts = np.diff(metadata.q_start)
    first = metadata.positions[metadata.q_start[:-1]]
    long = (counts >= max(fewest, FEWEST_ROWS)) & (first + counts == metadata.kv_len)
    return np.flatnonzero(long & (fewest > 0)).astype(np.int32)


@dataclass(frozen=True, slots=True)
class DenseSequence:
    """rows [start, stop) of the step see keys [start, stop) of the dense arrays; ``mask``: bool [rows, keys],
    or the name of the one that leaves out what comes later."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    mask: mx.array | str


@dataclass(frozen=True, slots=True)
class DensePlan:
    """Sequences of a step that are attended to densely, under one window.

    runs   [N, 4]  (first row of the dense arrays, keys, sequence, first position): a threadgroup each
    rows   [R]     the step's rows in the order of the outputs
    """

    runs: Ints
    device_runs: mx.array
    rows: Ints
    members: tuple[DenseSequence, ...]

    @property
    def num_keys(self) -> int:
        return self.members[-1].keys[1]


def plan_dense(
    metadata: AttentionMetadata, sequences: Ints, window: int | None, keep: int
) -> DensePlan | None:
    """Keys that no row sees are left out: those between the kept ones and the first row's window."""
    if not len(sequences):
        return None
    runs: list[tuple[int, int, int, int]] = []
    members, rows, start = [], [], 0
    for sequence in sequences.tolist():
        row, end_row = metadata.q_start[sequence : sequence + 2].tolist()
        end, first = int(metadata.kv_len[sequence]), int(metadata.positions[row])
        low = 0 if window is None else int(window_start(first, window))
        pieces = [(0, min(keep, low)), (low, end)]
        stop = start
        for begin, past in pieces:
            for position in range(begin, past, RUN_KEYS):
                count = min(RUN_KEYS, past - position)
                runs.append((stop, count, sequence, position))
                stop += count
        mask: mx.array | str = "causal"
        if window is not None and end > window:
            mask = _window_mask(first, end, pieces, window, keep)
        members.append(DenseSequence((row, end_row), (start, stop), mask))
        rows.append(np.arange(row, end_row, dtype=np.int32))
        start = stop
    made = np.array(runs, np.int32)
    return DensePlan(made, padded(made.ravel()), np.concatenate(rows), tuple(members))


def attend_densely(
    plan: DensePlan,
    queries: mx.array,
    dense: tuple[mx.array, mx.array],
    *,
    scale: float,
    sinks: mx.array | None,
) -> list[mx.array]:
    """queries [T, Hq, D] of the step and dense K and V [keys, Hkv, D] -> outputs [rows, Hq, D] of each
    sequence of the plan."""
    outs = []
    for member in plan.members:
        q = queries[member.rows[0] : member.rows[1]]
        k, v = (array[member.keys[0] : member.keys[1]] for array in dense)
        out = mx.fast.scaled_dot_product_attention(
            *(array.swapaxes(0, 1)[None] for array in (q, k, v)),
            scale=scale,
            mask=member.mask,
            sinks=None if sinks is None else sinks.astype(queries.dtype),
        )
        outs.append(out[0].swapaxes(0, 1))
    return outs


def _window_mask(first: int, end: int, pieces: list[tuple[int, int]], window: int, keep: int) -> mx.array:
    """Which keys of ``pieces`` the rows at first..end - 1 see; made on the device, once for layers alike."""
    keys = mx.concatenate([mx.arange(*piece) for piece in pieces])
    return visible(mx.arange(first, end)[:, None], keys, window, keep)
