"""Chunked attention: a sequence is cut into chunks of equal length, and a row sees only its own chunk.

It becomes full attention over shorter sequences: the rows of a chunk form a sequence with the chunk's pages
and positions. So kernels need no support for it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .metadata import AttentionMetadata, GroupMetadata, Ints


def cut_into_chunks(metadata: AttentionMetadata, chunk: int) -> AttentionMetadata:
    """Return a step in which every chunk is a sequence; ``chunk``: positions, a multiple of the page size."""
    if (metadata.positions < chunk).all():
        return metadata
    number, row_sequences = metadata.positions // chunk, metadata.row_sequences
    begins = np.diff(number, prepend=-1).astype(bool) | np.diff(row_sequences, prepend=-1).astype(bool)
    first = np.flatnonzero(begins).astype(np.int32)
    q_start = np.append(first, np.int32(metadata.num_tokens))
    positions = metadata.positions - number * np.int32(chunk)
    kv_len = positions[q_start[1:] - 1] + np.int32(1)
    owner, start = row_sequences[first], number[first] * np.int32(chunk)
    width = -(-int(kv_len.max()) // metadata.page_size)
    columns = (start[:, None] // metadata.page_size + np.arange(width)).astype(np.int32)
    return replace(
        metadata,
        positions=positions,
        q_start=q_start,
        kv_len=kv_len,
        groups=tuple(
            GroupMetadata(
                slots=group.slots,
                page_table=_columns(group.page_table[owner], columns),
                starts=None if group.starts is None else np.maximum(group.starts - number * chunk, 0),
            )
            for group in metadata.groups
        ),
    )


def _columns(table: Ints, columns: Ints) -> Ints:
    """Return columns [N, W] of each row of a table [N, P]; 0 past its end."""
    inside = columns < table.shape[1]
    taken = np.take_along_axis(table, np.where(inside, columns, 0), axis=1)
    return np.where(inside, taken, 0).astype(np.int32)
