from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import pytest

from octavo.engine.api.errors import InvalidConfig
from octavo.engine.memory.budget import weights_bytes
from octavo.engine.memory.model_files import resolve_model
from octavo.kernels import FORMATS_WITH_KERNELS
from octavo.kernels.backends import native_instructions
from octavo_lab.bench import engine as bench_engine
from octavo_lab.bench import kernels as bench_kernels
from octavo_lab.bench.work import model_work
from octavo_lab.kernels import kernel_timings, roofline
from octavo_lab.kernels.kernel_timings import WEIGHT_KINDS


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "TILE", 64)
    monkeypatch.setattr(kernel_timings, "WORKING_SET", 1 << 18)
    monkeypatch.setattr(kernel_timings, "DECODE_POSITIONS", 128)
    monkeypatch.setattr(kernel_timings, "MATRICES", ((256, 64), (64, 128)))
    monkeypatch.setattr(bench_kernels, "Timing", partial(kernel_timings.Timing, longest=0.002))


def run(bench: Any, *flags: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    result = bench.run(parser.parse_args(flags))
    return dict(json.loads(json.dumps(result)))


def test_engine_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model", "demo", "--batch", "3,1", "--prompt-tokens", "20", "--output-tokens", "4")
    result = run(bench_engine, *flags, "--kv-format", "fp4", "--threads", "1", "--max-step-tokens", "16")
    assert result["bench"] == "engine"
    assert (result["model"], result["kv_format"], result["threads"]) == ("demo", "fp4", 1)
    assert list(result["decode_tokens_per_s"]) == ["1", "3"]
    assert all(rate > 0 for rate in result["decode_tokens_per_s"].values())
    assert result["prefill_tokens_per_s"] == pytest.approx(20 / result["ttft_s"])
    assert result["peak_rss_bytes"] > result["kv_bytes"] > 0
    for batch, rate in result["decode_tokens_per_s"].items():
        parts = result["decode_step_ms"][batch]
        around = sum(parts[name] for name in ("plan", "batch", "run", "accept", "commit", "report"))
        assert parts["overhead"] == pytest.approx(around)
        if parts["kernels"] is not None:
            step_ms = int(batch) / rate * 1e3
            assert 0 < parts["kernels"] < parts["kernels"] + parts["overhead"] <= step_ms * 1.01
    roof = result["roofline"]
    assert roof["dram_read_gb_s"] > 0
    assert roof["matmul_gflop_s"] > 0
    assert result["prefill_of_limit"] > 0
    assert set(result["decode_of_limit"]) == {"1", "3"}
    assert result["isa"] == (native_instructions()[0] if result["backend"] == "cpu" else None)
    table = capsys.readouterr().out
    assert "prefill: 20 tokens" in table
    assert "DRAM read" in table


def test_prompts_that_cannot_fit_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"1 sequences of up to 9\d+ tokens do not fit: only 8192"):
        run(bench_engine, "--batch", "1", "--prompt-tokens", "9000", "--max-running", "4")
    with pytest.raises(InvalidConfig, match="batch 8 exceeds max_running 4"):
        run(bench_engine, "--batch", "8", "--max-running", "4")


@pytest.mark.parametrize("flags", [("--batch", "0"), ("--batch", "1,x"), ("--prompt-tokens", "0")])
def test_counts_must_be_counts(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(bench_engine, *flags)
    assert "must be" in capsys.readouterr().err


def test_the_demo_models_work_is_counted_from_its_files() -> None:
    path = resolve_model("demo")
    config = json.loads((path / "config.json").read_text())
    hidden, heads, kv_heads, dim, inner = (
        config[name]
        for name in (
            "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
        )
    )  # fmt: skip
    per_layer = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    work = model_work(path, weights_bytes(path))
    assert work is not None
    assert work.linear_parameters == config["num_hidden_layers"] * per_layer
    assert work.streamed_bytes == weights_bytes(path), "its head is its embedding, so all is read"


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_kernels_json(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--backend", backend, "--contexts", "32,64", "--chunk", "16", "--rows", "1,4")
    result = run(bench_kernels, *flags, "--weights", ",".join(WEIGHT_KINDS))
    assert result["bench"] == "kernels"
    attention = {(row["kernel"], row["k_format"], row["context"]) for row in result["attention"]}
    for name in FORMATS_WITH_KERNELS:
        for context in (32, 64):
            assert ("decode", name, context) in attention
            assert ("chunk", name, context) in attention
        assert any(kernel == "write" and fmt == name for kernel, fmt, _ in attention)
    assert {(row["weights"], row["rows"]) for row in result["linear"]} == {
        (weights, rows) for weights in WEIGHT_KINDS for rows in (1, 4)
    }
    for row in result["attention"] + result["linear"]:
        assert row["us"] > 0
        assert row["gb_s"] > 0
    assert "decode" in capsys.readouterr().out
