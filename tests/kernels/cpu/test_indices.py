from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from native import require_extension
from octavo.kernels.interface import LayerSpec, PoolSpec
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata

pytestmark = pytest.mark.property

require_extension()

from octavo.kernels.cpu.backend import CpuPool  # noqa: E402

SPEC = PoolSpec(
    layers=(LayerSpec(num_kv_heads=1, head_dim=32, value_dim=32),),
    num_pages=4,
    page_size=8,
    k_format="bf16",
    v_format="bf16",
)
STEP = AttentionMetadata.of([(3, 5), (9, 10)], np.array([[1, 0], [2, 3]], np.int32), page_size=SPEC.page_size)


@pytest.mark.parametrize(("columns", "width"), [(2, 64), (64, 64), (65, 256), (257, 1024)])
@pytest.mark.parametrize("starts", [None, [7, 8, 9]])
def test_numbers_are_packed_one_array_after_the_other(
    columns: int, width: int, starts: list[int] | None
) -> None:
    table = np.arange(2 * columns, dtype=np.int32).reshape(2, columns) % SPEC.num_pages
    group = GroupMetadata(
        slots=STEP.only_group().slots,
        page_table=table,
        starts=None if starts is None else np.array(starts, np.int32),
    )
    pool = CpuPool(SPEC)
    pool.begin_group(STEP, group)
    (packed,) = pool.packed_values()
    assert packed.dtype == np.int32
    padded = [number for row in table.tolist() for number in row + [0] * (width - columns)]
    assert packed.tolist() == [11, 12, 25, 0, 2, 3, 5, 10, *padded, *(starts or [0] * 3), 0, 0, 0]


def test_a_refused_step_leaves_the_pool_in_the_step_before() -> None:
    pool, group = CpuPool(SPEC), STEP.only_group()
    pool.begin_step(STEP)
    (before,) = pool.packed_values()
    changes: tuple[dict[str, Any], ...] = (
        {"slots": group.slots + 8},
        {"page_table": group.page_table + 1},
        {"page_table": group.page_table.astype(np.int64)},
        {"starts": np.zeros(2, np.int32)},
    )
    for change in changes:
        wrong = group._replace(**change)
        with pytest.raises(ValueError, match="must"):
            pool.begin_step(replace(STEP, groups=(wrong,)))
        assert pool.packed_values()[0] is before
