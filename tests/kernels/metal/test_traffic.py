from __future__ import annotations

import mlx.core as mx
import pytest

from attention_cases import Case
from metal_backend import PAGES, needs_compiler
from metal_cases import case_id, run_watched, shape
from metal_checks import minimum_bytes, pages_read
from metal_emulator import Result
from octavo.kernels import page_format
from octavo.kernels.metal.attention_units import MAX_HEADS

pytestmark = [pytest.mark.parity, pytest.mark.slow, needs_compiler, pytest.mark.timeout(300)]


def last_decode(case: Case, formats: tuple[str, str]) -> list[Result]:
    _, emulator = run_watched(case, formats, mx.float16)
    return emulator.ran("decode")


@pytest.mark.parametrize(
    ("head_dim", "group", "page_size", "formats", "options"),
    [
        (128, 4, 32, ("fp4", "fp4"), {}),
        (64, 16, 16, ("fp4", "fp4"), {}),
        (80, 3, 64, ("fp4", "fp16"), {}),
        (128, 2, 16, ("int8", "int4"), {}),
        (64, 2, 16, ("affine8", "affine4"), {}),
        (64, 2, 16, ("fp4", "fp4"), {"window": 300, "keep": 5}),
    ],
)
def test_decode_reads_each_visible_row_once_for_all_its_query_heads(
    head_dim: int, group: int, page_size: int, formats: tuple[str, str], options: dict[str, int]
) -> None:
    case = shape(
        "", head_dim, group, page_size, kv_heads=1, sequences=((400, 1), (545, 1), (37, 1)), **options
    )
    launches = last_decode(case, formats)
    minimum = minimum_bytes(case, formats)
    fetched = sum(pages_read(launch).unique_bytes for launch in launches)
    loaded = sum(pages_read(launch).bytes for launch in launches)
    everything = sum(launch.traffic.bytes_read for launch in launches)
    queries = sum(launch.traffic.read("queries").bytes for launch in launches)
    assert fetched == minimum
    slices = -(-group // MAX_HEADS)
    assert loaded / slices / minimum < (1.1 if options else 1.05)
    assert ((everything - loaded - queries) / slices + fetched) / minimum < 1.05
    assert launches[0].stats.threadgroup_bytes <= 32768


CODES = [
    (("fp16", "bf16"), 128, 16),
    (("fp4", "fp4"), 80, 16),
    (("fp4", "fp4"), 192, 32),
    (("int8", "affine8"), 128, 32),
    (("int4", "mxfp4"), 96, 16),
    (("nvfp4", "affine4"), 192, 32),
]


@pytest.mark.parametrize(("formats", "head_dim", "page_size"), CODES)
def test_loads_of_codes_are_coalesced(formats: tuple[str, str], head_dim: int, page_size: int) -> None:
    case = shape("", head_dim, 2, page_size, kv_heads=2, sequences=((319, 1), (95, 1)))
    for launch in last_decode(case, formats):
        assert pages_read(launch, "k_codes").line_ratio == 1.0
        assert pages_read(launch, "v_codes").line_ratio == 1.0


@pytest.mark.parametrize("formats", [("fp4", "fp4"), ("int8", "nvfp4"), ("affine4", "mxfp4")], ids=case_id)
def test_a_chunk_reads_keys_once_per_tile_of_queries(formats: tuple[str, str]) -> None:
    """A tile has 16 tokens of 4 query heads, so 40 tokens are 3 tiles; each tile reads the keys."""
    case = shape("", 64, 4, 16, kv_heads=2, sequences=((96, 40),))
    _, emulator = run_watched(case, formats, mx.float16)
    rows = sum(96 + new for new in (16, 32, 40))
    chunk = emulator.ran("chunk")[-1]
    assert pages_read(chunk).bytes == rows * 2 * sum(page_format(name).row_bytes(64) for name in formats)
    assert pages_read(chunk, "k_codes", "v_codes").line_ratio == 1.0


@pytest.mark.parametrize("name", ["fp4", "nvfp4", "affine4"])
def test_a_write_moves_each_row_once(name: str) -> None:
    case = shape("", 128, 2, 16, kv_heads=2, sequences=((0, 33),))
    _, emulator = run_watched(case, (name, name), mx.float16)
    (launch,) = emulator.ran("write")
    assert launch.traffic.read("keys", "values").bytes == 2 * 33 * 2 * 128 * 2
    written = launch.traffic.written(*(part for part in PAGES if part in launch.traffic.writes))
    assert written.bytes == 2 * 33 * 2 * page_format(name).row_bytes(128)
