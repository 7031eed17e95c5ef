from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..interface import AttendOptions, LayerSpec
from ..masks import HIDDEN
from ..metadata import AttentionMetadata, Ints
from ..visibility import visible

LOWEST = -3e38  # finite stand-in for the maximum of a row that sees nothing
TINY = 1e-30  # smaller than any sum of weights, because the largest weight is 1


@dataclass(frozen=True, slots=True)
class EqualRows:
    """B sequences that have the same number n of rows in this step.

    rows       [B, n]  indices of the sequences' rows in the step
    tables     [B, P]  pages of the sequences; the longest has P pages
    positions  [B, n]  positions of the rows
    last       [B, n]  last position that each row sees
    lengths    [B]     number of positions of each sequence that have K/V
    """

    rows: mx.array
    tables: mx.array
    positions: mx.array
    last: mx.array
    lengths: mx.array


@dataclass(frozen=True, slots=True)
class Bias:
    """Hides positions from rows: by a mask [T, 1 or Hq, L] or, without a mask, by causality and window."""

    mask: mx.array | None = None

    def hide(self, logits: mx.array, group: EqualRows, spec: LayerSpec) -> mx.array:
        """Return logits [B, Hkv, G, n, L] with -inf where a row does not see a position."""
        length = logits.shape[-1]
        if self.mask is None:
            rows, last = group.positions[..., None], group.last[..., None]
            seen = visible(rows, mx.arange(length), spec.window, spec.keep, last)
            return mx.where(seen[:, None, None], logits, -mx.inf)
        rows = self.mask[group.rows][..., :length].transpose(0, 2, 1, 3)  # [B, 1 or Hq, n, L]
        if rows.shape[-1] < length:
            rows = mx.pad(rows, [(0, 0), (0, 0), (0, 0), (0, length - rows.shape[-1])])
        heads = logits.shape[1:3] if rows.shape[1] > 1 else (1, 1)
        rows = rows.reshape(rows.shape[0], *heads, *rows.shape[2:])
        seen = mx.arange(length) < group.lengths[:, None, None, None, None]
        if rows.dtype == mx.bool_:
            return mx.where(mx.logical_and(rows, seen), logits, -mx.inf)
        rows = rows.astype(mx.float32)
        seen = mx.logical_and(seen, mx.logical_not(rows <= HIDDEN))
        return mx.where(seen, logits + rows, -mx.inf)


def group_sequences(metadata: AttentionMetadata) -> tuple[list[EqualRows], Ints]:
    """Group the sequences of a step by their number of rows.

    Also return the permutation [T] from the concatenated groups to the order of the step.
    """
    counts = np.diff(metadata.q_start)
    groups, order = [], []
    for n in np.unique(counts):
        members = np.flatnonzero(counts == n)
        lengths = metadata.kv_len[members]
        num_pages = -(-int(lengths.max()) // metadata.page_size)
        rows = metadata.q_start[members, None] + np.arange(n, dtype=np.int32)
        order.append(rows.ravel())
        groups.append(
            EqualRows(
                rows=mx.array(rows),
                tables=mx.array(metadata.only_group().page_table[members, :num_pages]),
                positions=mx.array(metadata.positions[rows]),
                last=mx.array(metadata.seen_until[rows]),
                lengths=mx.array(lengths),
            )
        )
    return groups, np.argsort(np.concatenate(order)).astype(np.int32)


Kind = tuple[mx.array | None, mx.array, mx.array]
"""Keys [B, Hkv, L, D] and values [B, Hkv, L, Dv] in one kind of pages, float32, and which positions each row
reads from them, [B, n, L] (None: all). L may exceed a sequence's length."""


def attend_group(
    group: EqualRows,
    queries: mx.array,
    kinds: Sequence[Kind],
    *,
    spec: LayerSpec,
    options: AttendOptions,
    bias: Bias,
) -> mx.array:
    """Return attention [B * n, Hq, Dv] of scaled queries [B, n, Hq, D] over K and V of their sequences."""
    sequences, n, num_heads, _ = queries.shape
    kv_heads, shared, length = spec.num_kv_heads, num_heads // spec.num_kv_heads, kinds[0][1].shape[2]
    folded = queries.reshape(sequences, n, kv_heads, shared, -1).transpose(0, 2, 3, 1, 4)
    folded = folded.reshape(sequences, kv_heads, shared * n, -1)
    logits = mx.zeros((sequences, kv_heads, shared, n, length))
    for reads, keys, _ in kinds:
        own = (folded @ keys.swapaxes(-1, -2)).reshape(logits.shape)
        logits = own if reads is None else mx.where(reads[:, None, None], own, logits)
    weights = attention_weights(logits, group, spec=spec, options=options, bias=bias)
    live = mx.arange(length) < group.lengths[:, None, None]
    out: mx.array | None = None
    for reads, _, values in kinds:
        part = weights if reads is None else mx.where(reads[:, None, None], weights, 0.0)
        part = part.reshape(sequences, kv_heads, shared * n, length)
        # Other positions may hold NaN of other sequences, and 0 * NaN is NaN.
        wanted = mx.logical_and((part != 0).any(axis=2), live)
        product = part @ mx.where(wanted[..., None], values, 0.0)
        out = product if out is None else out + product
    assert out is not None
    out = out.reshape(sequences, kv_heads, shared, n, -1).transpose(0, 3, 1, 2, 4)
    return out.reshape(sequences * n, num_heads, -1)


def attention_weights(
    logits: mx.array, group: EqualRows, *, spec: LayerSpec, options: AttendOptions, bias: Bias
) -> mx.array:
    """Return the softmax of logits [B, Hkv, G, n, L] over the positions that each row sees."""
    if (softcap := options.softcap) is not None:
        logits = softcap * mx.tanh(logits / softcap)
    logits = bias.hide(logits, group, spec)
    sinks = options.sinks
    return softmax(logits, None if sinks is None else sinks.reshape(1, *logits.shape[1:3], 1, 1))


def softmax(logits: mx.array, sinks: mx.array | None) -> mx.array:
    """Return the softmax over the last axis. A sink is one more logit in the denominator.

    If all logits of a row are -inf, its weights are 0.
    """
    top = mx.maximum(logits.max(axis=-1, keepdims=True), LOWEST)
    if sinks is None:
        weights = mx.exp(logits - top)
        return weights / mx.maximum(weights.sum(axis=-1, keepdims=True), TINY)
    sinks = sinks.astype(mx.float32)
    top = mx.maximum(top, sinks)
    weights = mx.exp(logits - top)
    return weights / (weights.sum(axis=-1, keepdims=True) + mx.exp(sinks - top))
