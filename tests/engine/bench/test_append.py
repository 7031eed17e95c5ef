"""``octavo bench append``: the keys of its JSON, what each way writes, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from octavo.engine.bench import append
from octavo.engine.cli import main
from octavo.engine.executor import append_timings
from octavo.engine.executor.append_timings import (
    DENSE_ROW_BYTES,
    time_concatenation,
    time_mlx_lm,
    time_pages,
)
from octavo.kernels import FORMATS_WITH_KERNELS, page_format
from octavo.kernels.bench.kernel_timings import HEAD_DIM, KV_HEADS
from octavo.kernels.reference.backend import ReferenceBackend, ReferencePool

SMALL = ("--contexts", "64,16", "--tokens", "6", "--concatenated", "2", "--page-size", "8")


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[str, dict[str, Any]]:
    assert main(["bench", "append", *SMALL, *flags, "--json"]) == 0
    *table, last = capsys.readouterr().out.strip().splitlines()
    return "\n".join(table), json.loads(last)


def test_json_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    table, result = run(capsys)
    assert result["bench"] == "append"
    assert result["page_size"] == 8
    assert result["token_bytes"] == DENSE_ROW_BYTES == 4096
    assert list(result["pages"]) == list(FORMATS_WITH_KERNELS)
    for name, by_context in (*result["pages"].items(), ("concatenate", result["concatenate"])):
        assert list(by_context) == ["16", "64"], name
        for row in by_context.values():
            assert 0 < row["us_per_token"] <= row["worst_us"]
            assert row["bytes_per_token"] > 0
    assert list(result["mlx_lm"]) == ["16", "64"]
    lines = table.splitlines()
    assert sum(line.startswith("pages ") for line in lines) == 2 * len(FORMATS_WITH_KERNELS)
    assert sum(line.startswith(("concatenation", "mlx-lm")) for line in lines) == 4


def test_pages_cost_a_row_and_concatenation_all_that_was_there(capsys: pytest.CaptureFixture[str]) -> None:
    _, result = run(capsys, "--formats", "bf16,fp4", "--backend", "reference")
    for name in ("bf16", "fp4"):
        row_bytes = 2 * KV_HEADS * page_format(name).row_bytes(HEAD_DIM)
        assert {row["bytes_per_token"] for row in result["pages"][name].values()} == {row_bytes}
    for context, row in result["concatenate"].items():  # two tokens: contexts of one and of two more
        assert row["bytes_per_token"] == (int(context) + 1.5) * DENSE_ROW_BYTES
    assert all(row["bytes_per_token"] == DENSE_ROW_BYTES for row in result["mlx_lm"].values())


def test_mlx_lms_cache_grows_once_in_256_tokens() -> None:
    grown = time_mlx_lm(context=256, tokens=256).num_bytes
    assert grown == DENSE_ROW_BYTES * (255 + 512) / 256


def test_the_timed_pages_hold_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured writes are real: each position of the run is in its page when the timing ends."""
    pools: list[ReferencePool] = []
    create = ReferenceBackend.create_pool

    def keep(self: ReferenceBackend, spec: Any) -> ReferencePool:
        pools.append(create(self, spec))
        return pools[-1]

    monkeypatch.setattr(ReferenceBackend, "create_pool", keep)
    time_pages(ReferenceBackend(), "bf16", context=10, tokens=7, page_size=4)
    (pool,) = pools
    pages = pool.spec.num_pages
    data = pool.read_pages(range(pages)).reshape(pages, 2 * append_timings.LAYERS, KV_HEADS, 4, -1)
    assert int(np.any(data, axis=(1, 2, 4)).sum()) == 7, "7 rows are not zero"


def test_concatenation_grows_the_arrays() -> None:
    keys = mx.ones((1, 2, 3, 4))
    cache = append_timings.GrowingCache(keys, keys)
    grown = cache.append(mx.zeros((1, 2, 1, 4)), mx.zeros((1, 2, 1, 4)))
    assert [array.shape for array in grown] == [(1, 2, 4, 4)] * 2
    assert cache.keys[0, 0, :, 0].tolist() == [1, 1, 1, 0]
    assert time_concatenation(context=8, tokens=1).num_bytes == 9 * DENSE_ROW_BYTES


def test_a_format_without_kernels_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: ReferenceBackend, spec: Any) -> ReferencePool:
        if spec.k_format == "fp4":
            raise ValueError("no pages of fp4 today")
        return create(self, spec)

    create = ReferenceBackend.create_pool
    monkeypatch.setattr(ReferenceBackend, "create_pool", refuse)
    table, result = run(capsys, "--backend", "reference", "--formats", "fp4,int8")
    assert list(result["pages"]) == ["int8"]
    assert "not measured: no pages of fp4 today" in table


def test_what_cannot_fit_is_refused_before_it_is_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(append, "available_memory", lambda: 1 << 20)
    assert main(["bench", "append", "--contexts", "4096"]) == 2
    error = capsys.readouterr().err
    assert "4352 positions takes" in error
    assert "give a smaller --contexts" in error


@pytest.mark.parametrize("flags", [("--contexts", "0"), ("--formats", "fp3"), ("--tokens", "x")])
def test_bad_values(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "append", *flags]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
