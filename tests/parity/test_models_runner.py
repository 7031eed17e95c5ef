"""The runner: failures stay with their sequence, copies and slices change nothing, weights convert."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import psutil  # type: ignore[import-untyped,unused-ignore]
import pytest
from mlx.utils import tree_flatten

import tiny_models
from attention_backends import BACKENDS, TestedBackend
from format_rows import holds
from octavo.block_manager import PageCopy, PageId
from octavo.engine.batch import Batch
from octavo.engine.config import EngineConfig
from octavo.engine.errors import InvalidConfig, ModelLoadError
from octavo.engine.memory import page_bytes
from octavo.engine.model import paged, startup
from octavo.engine.model.forward import slice_rows
from octavo.engine.model.layers import discover_layout
from octavo.engine.model.loader import load_model
from octavo.engine.model.locate import read_config
from octavo.engine.params import SamplingParams
from octavo.engine.plan import layer_specs, plan, render
from octavo.engine.runner import RunOutput, load_runner
from octavo.engine.sampler import SampleState
from octavo.kernels.formats import FORMAT_NAMES, RECIPE
from octavo.kernels.metadata import AttentionMetadata, Ints

PAGE_SIZE = 8
GREEDY = SamplingParams(logprobs=0)


def i32(values: Any) -> Ints:
    return np.array(list(values), np.int32)


def state(params: SamplingParams = GREEDY, seed: int = 0) -> SampleState:
    return SampleState(params, seed=seed, prompt_ids=[], vocab_size=tiny_models.VOCAB_SIZE)


def make_batch(
    work: list[tuple[list[int], int, list[int]]], rows: list[int], copies: tuple[PageCopy, ...] = ()
) -> Batch:
    """``work``: new tokens, first position and pages of each sequence."""
    positions = [i32(range(start, start + len(tokens))) for tokens, start, _ in work]
    width = max(len(pages) for *_, pages in work)
    table = np.zeros((len(work), width), np.int32)
    for row, (*_, pages) in zip(table, work, strict=True):
        row[: len(pages)] = pages
    slots = [
        i32(pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in own)
        for own, (*_, pages) in zip(positions, work, strict=True)
    ]
    counts = [len(tokens) for tokens, *_ in work]
    return Batch(
        token_ids=np.concatenate([i32(tokens) for tokens, *_ in work]),
        sample_rows=i32(rows),
        attention=AttentionMetadata(
            positions=np.concatenate(positions),
            slots=np.concatenate(slots),
            q_start=i32([0, *np.cumsum(counts)]),
            kv_len=i32(start + len(tokens) for tokens, start, _ in work),
            page_table=table,
            page_size=PAGE_SIZE,
        ),
        copies=copies,
    )


def tokens_of(output: RunOutput) -> list[int | None]:
    return [sample.token for sample in output.samples]


def logprobs_of(output: RunOutput) -> list[float]:
    return [sample.logprob.logprob for sample in output.samples if sample.logprob is not None]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> str:
    chosen: TestedBackend = request.param
    chosen.create()
    return chosen.name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_model(tmp_path_factory.mktemp("llama"), "llama")


def load(folder: Path, backend: str, **settings: Any) -> paged.PagedRunner:
    settings = {"page_size": PAGE_SIZE, "num_pages": 40, "max_running": 8, "max_step_tokens": 64} | settings
    return startup.load_paged_runner(EngineConfig(model=str(folder), backend=backend, **settings))  # type: ignore[arg-type]


@pytest.fixture
def runner(folder: Path, backend: str) -> Iterator[paged.PagedRunner]:
    loaded = load(folder, backend)
    yield loaded
    loaded.close()


PROMPT = [7, 30, 200, 5, 99, 14, 3, 250, 41, 17, 6]


def test_a_row_sampled_twice_and_rows_in_any_order(runner: paged.PagedRunner) -> None:
    batch = make_batch([(PROMPT, 0, [3, 9]), (PROMPT[:4], 0, [5])], [14, 10, 10])
    output = runner.run(batch, [state(), state(), state()])
    alone = [
        runner.run(make_batch([(PROMPT[:4], 0, [1])], [3]), [state()]),
        runner.run(make_batch([(PROMPT, 0, [1, 2])], [10]), [state()]),
    ]
    assert tokens_of(output) == [*tokens_of(alone[0]), *tokens_of(alone[1]) * 2]
    assert output.failed_rows == ()


def test_a_step_without_samples_writes_its_pages(runner: paged.PagedRunner) -> None:
    whole = runner.run(make_batch([(PROMPT, 0, [1, 2])], [10]), [state()])
    assert runner.run(make_batch([(PROMPT[:6], 0, [4, 5])], []), []).samples == ()
    chunked = runner.run(make_batch([(PROMPT[6:], 6, [4, 5])], [4]), [state()])
    assert tokens_of(chunked) == tokens_of(whole)
    assert logprobs_of(chunked) == pytest.approx(logprobs_of(whole), abs=0.1)


def test_pages_are_copied_before_the_step_writes(runner: paged.PagedRunner) -> None:
    runner.run(make_batch([(PROMPT, 0, [1, 2])], []), [])
    wanted = runner.run(make_batch([([9], 11, [1, 2])], [0]), [state()])
    runner.run(make_batch([([200], 11, [1, 2])], []), [])  # overwrites the slot of the token 9
    copies = (PageCopy(PageId(2), PageId(7)),)
    got = runner.run(make_batch([([9], 11, [1, 7])], [0], copies), [state()])
    assert tokens_of(got) == tokens_of(wanted)
    assert logprobs_of(got) == logprobs_of(wanted)
    kept = runner.run(make_batch([([4], 12, [1, 2])], [0]), [state()])
    other = runner.run(make_batch([([4], 12, [1, 7])], [0]), [state()])
    assert logprobs_of(kept) != logprobs_of(other), "the copy must not be the original"


def test_samples_do_not_depend_on_neighbours(runner: paged.PagedRunner) -> None:
    params = SamplingParams(temperature=1.0, seed=1, logprobs=0)
    alone = runner.run(make_batch([(PROMPT, 0, [1, 2])], [10]), [state(params, 5)])
    work = [(PROMPT[:7], 0, [3]), (PROMPT, 0, [4, 6]), ([8], 0, [5])]
    together = runner.run(make_batch(work, [6, 17, 18]), [state(params, 1), state(params, 5), state()])
    assert together.samples[1].token == alone.samples[0].token


def test_logits_that_are_not_finite_fail_their_row_only(
    runner: paged.PagedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = runner._model.forward

    def spoilt(*args: Any) -> mx.array:
        logits = forward(*args)
        return mx.where(mx.arange(len(logits))[:, None] == 1, mx.array(float("nan"), logits.dtype), logits)

    monkeypatch.setattr(runner._model, "forward", spoilt)
    work = [(PROMPT[:3], 0, [1]), (PROMPT[:4], 0, [2]), (PROMPT[:2], 0, [3])]
    output = runner.run(make_batch(work, [2, 6, 8]), [state(), state(), state()])
    first, bad, last = output.samples
    assert first.token is not None
    assert last.token is not None
    assert bad.token is None
    assert bad.error is not None
    assert "not finite" in bad.error
    assert output.failed_rows == ()


@pytest.mark.parametrize(
    ("name", "gather_bytes"),
    [("llama", 2**28), ("deepseek_v3", 2**28), ("deepseek_v3", 1)],
    ids=["paged", "gather", "gather in slices"],
)
def test_keys_that_are_not_finite_fail_their_sequence_only(
    tmp_path: Path, backend: str, name: str, gather_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 13 has an embedding of infinity: whoever reads it gets K that cannot be stored."""
    monkeypatch.setattr(paged, "GATHER_BYTES", gather_bytes)
    folder = tiny_models.make_model(tmp_path, name, dtype=mx.float32)
    runner = load(folder, backend)
    model = runner._model._model.model
    weight = np.array(model.embed_tokens.weight)
    weight[13] = np.inf
    model.embed_tokens.weight = mx.array(weight)
    work = [(PROMPT[:3], 0, [1]), ([13, 6], 0, [2]), ([5, 13, 4], 0, [3]), ([8], 0, [4])]
    output = runner.run(make_batch(work, [2, 4, 8]), [state(), state(), state()])
    good, bad, last = output.samples
    assert good.token is not None
    assert last.token is not None
    assert bad.token is None
    assert bad.error is not None
    assert "keys or values" in bad.error
    failed = set(output.failed_rows)
    assert {3, 6} <= failed, "the sequence that samples nothing must be told of, too"
    assert not failed & {0, 1, 2}
    # What was stored is zeros, so the next step of a neighbour on other pages is as before.
    again = runner.run(make_batch([(PROMPT[:3], 0, [1])], [2]), [state()])
    assert tokens_of(again) == [good.token]
    runner.close()


@pytest.mark.parametrize("token", [-1, tiny_models.VOCAB_SIZE])
def test_token_ids_outside_the_vocabulary_never_reach_the_embedding(
    runner: paged.PagedRunner, token: int
) -> None:
    with pytest.raises(ValueError, match=r"token ids must lie in \[0, 320\)"):
        runner.run(make_batch([([3, token], 0, [1])], [1]), [state()])


def test_pages_outside_the_pool_never_reach_a_kernel(runner: paged.PagedRunner) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        runner.run(make_batch([(PROMPT, 0, [1, 40])], [10]), [state()])


def test_the_gather_tier_in_slices_is_the_gather_tier_at_once(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(tiny_models.make_model(tmp_path, "gemma2", dtype=mx.float32), backend)
    assert runner.info.tier == "gather"
    work = [([9], 11, [1, 2]), (PROMPT, 0, [3, 4]), (PROMPT[:5], 0, [5])]
    runner.run(make_batch([(PROMPT, 0, [1, 2])], []), [])
    once = runner.run(make_batch(work, [0, 5, 11, 16]), [state() for _ in range(4)])
    calls: list[int] = []
    forward = runner._model.forward

    def counted(ids: Ints, *rest: Any) -> mx.array:
        calls.append(len(ids))
        return forward(ids, *rest)

    monkeypatch.setattr(runner._model, "forward", counted)
    monkeypatch.setattr(paged, "GATHER_BYTES", 4 * 12 * runner._dense_row_bytes)  # type: ignore[operator]
    sliced = runner.run(make_batch(work, [0, 5, 11, 16]), [state() for _ in range(4)])
    assert calls == [4, 4, 4, 4, 1]
    assert tokens_of(sliced) == tokens_of(once)
    assert logprobs_of(sliced) == pytest.approx(logprobs_of(once), abs=1e-3)
    runner.close()


def test_slices_are_the_rows_and_nothing_else() -> None:
    metadata = make_batch([([9], 11, [1, 2]), (PROMPT, 0, [3, 4]), (PROMPT[:5], 0, [5])], []).attention
    part = slice_rows(metadata, 3, 13)
    part.check(num_pages=40)
    assert part.positions.tolist() == [*range(2, 11), 0]
    assert part.slots.tolist() == metadata.slots[3:13].tolist()
    assert part.q_start.tolist() == [0, 9, 10]
    assert part.kv_len.tolist() == [11, 1]
    assert part.page_table.tolist() == [[3, 4], [5, 0]]
    assert slice_rows(metadata, 0, 17) is metadata


FITTING = [name for name in FORMAT_NAMES if holds(name, head_dim=16)]  # that of the tiny models


@pytest.mark.parametrize("kv_format", FITTING)
def test_the_budget_is_what_is_allocated_and_what_plan_says(
    folder: Path, backend: str, kv_format: str
) -> None:
    runner = load(folder, backend, kv_format=kv_format)
    info = runner.info
    assert info.memory.pages == runner._model.pool.nbytes
    row = plan(model=str(folder), memory=10**9, page_size=PAGE_SIZE)["formats"][kv_format]
    assert info.memory.pages == 40 * row["bytes_per_page"]
    assert info.memory.weights > 0
    runner.close()
    half = load(
        folder, backend, kv_format=kv_format, num_pages=None, kv_memory=20 * row["bytes_per_page"] + 1
    )
    assert half.info.num_pages == 20
    half.close()


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss"])
def test_plan_splits_a_budget_among_groups_as_the_engine_does(tmp_path: Path, architecture: str) -> None:
    path = tiny_models.make_model(tmp_path, architecture)
    fixed = plan(model=str(path), memory=10**9, page_size=PAGE_SIZE)
    result = plan(
        model=str(path),
        memory=fixed["weights_bytes"] + fixed["workspace_bytes"] + 9_000_001,
        page_size=PAGE_SIZE,
    )
    assert result["kv_bytes"] == 9_000_001
    row = result["formats"]["fp4"]
    full, window = row["groups"]
    assert (full["window"], window["window"]) == (None, tiny_models.WINDOW)
    assert window["pages"] < full["pages"] == row["pages"]
    assert f"2 layers see {tiny_models.WINDOW} positions: 3 pages" in render(result)
    runner = load(
        path, "cpu", kv_format="fp4", num_pages=None, kv_memory=9_000_001, max_running=64, max_step_tokens=512
    )
    assert [group.num_pages for group in runner.info.groups] == [full["pages"], window["pages"]]
    planned = sum(group["pages"] * group["bytes_per_page"] for group in row["groups"])
    assert runner.info.memory.pages == planned
    assert 9_000_001 - full["bytes_per_page"] < planned <= 9_000_001
    runner.close()


def test_a_format_that_cannot_hold_the_rows_is_refused(folder: Path, backend: str) -> None:
    """Groups of 32 or 64 values have no rows of 16: a clear refusal, in the plan too."""
    result = plan(model=str(folder), memory=10**9, page_size=PAGE_SIZE)
    assert list(result["formats"]) == [*FITTING, RECIPE]
    assert sorted(result["refused"]) == sorted(set(FORMAT_NAMES) - set(FITTING))
    for name, reason in result["refused"].items():
        assert "head_dim 16" in reason
        with pytest.raises(InvalidConfig, match="head_dim 16"):
            load(folder, backend, kv_format=name)


@pytest.mark.parametrize("name", sorted(tiny_models.CONFIGS))
def test_plan_reads_the_shapes_that_the_model_has(tmp_path: Path, name: str) -> None:
    path = tiny_models.make_model(tmp_path, name)
    found = discover_layout(load_model(path, weights="keep").model, name).layers
    predicted = layer_specs(path, read_config(path))
    assert predicted == found
    for kv_format in FITTING:
        sizes = [
            page_bytes(layers, page_size=4, k_format=kv_format, v_format=kv_format)
            for layers in (found, predicted)
        ]
        assert sizes[0] == sizes[1]


@pytest.mark.parametrize(("weights", "named"), [("bf16", "bf16"), ("int8", "int8"), ("int4", "int4")])
def test_weights_convert_on_loading(tmp_path: Path, backend: str, weights: str, named: str) -> None:
    folder = tiny_models.make_model(tmp_path, "qwen3", dtype=mx.float32)
    plain, converted = load(folder, backend), load(folder, backend, weights=weights)
    assert plain.info.weights == "fp32"
    assert converted.info.weights == named
    assert converted.info.memory.weights < plain.info.memory.weights * 0.6
    batch = make_batch([(PROMPT, 0, [1, 2])], [10])
    before, after = (runner.run(batch, [state(SamplingParams(logprobs=5))]) for runner in (plain, converted))
    tolerance = {"bf16": 0.3, "int8": 0.5, "int4": 8.0}[weights]
    assert logprobs_of(after) == pytest.approx(logprobs_of(before), abs=tolerance)
    plain.close()
    converted.close()


def test_quantized_folders_load_and_are_not_quantized_again(
    tmp_path: Path, folder: Path, backend: str
) -> None:
    import json

    quantized = tmp_path / "quantized"
    model = load_model(folder, weights="int8").model
    quantized.mkdir()
    mx.save_safetensors(str(quantized / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = read_config(folder) | {"quantization": {"group_size": 64, "bits": 8}}
    (quantized / "config.json").write_text(json.dumps(config))
    runner = load(quantized, backend)
    assert runner.info.weights == "int8"
    runner.close()
    for weights in ("bf16", "int8", "int4"):
        with pytest.raises(InvalidConfig, match="quantized already; use weights='keep'"):
            load(quantized, backend, weights=weights)


def test_models_that_cannot_be_quantized_are_refused(tmp_path: Path) -> None:
    folder = tiny_models.make_model(
        tmp_path, "llama", hidden_size=48, intermediate_size=96, head_dim=8, num_attention_heads=4
    )
    with pytest.raises(InvalidConfig, match="multiple of 64"):
        load_model(folder, weights="int4")


def test_failures_to_load_are_one_clear_line(tmp_path: Path, folder: Path) -> None:
    def refused(path: Path, **settings: Any) -> str:
        with pytest.raises(InvalidConfig) as caught:
            load_runner(EngineConfig(model=str(path), backend="reference", **settings))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    import json
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    config = read_config(folder)
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "no_such_type"}))
    assert "no_such_type not supported" in refused(broken)
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    assert "cannot load" in refused(broken)
    (broken / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "cannot load" in refused(broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "should be" in refused(broken)
    assert "max_model_len is 513" in refused(folder, max_model_len=513)
    assert "are available; lower kv_memory or num_pages" in refused(folder, num_pages=10**9)
    assert issubclass(ModelLoadError, InvalidConfig)


def test_memory_stays_flat_however_the_steps_vary(runner: paged.PagedRunner) -> None:
    rng = np.random.default_rng(0)
    process = psutil.Process()

    def some_steps(count: int) -> int:
        for _ in range(count):
            tokens = rng.integers(0, 300, int(rng.integers(1, 60))).tolist()
            batch = make_batch([(tokens, 0, list(range(1, 9))), ([5], 0, [10])], [len(tokens)])
            runner.run(batch, [state()])
        return int(process.memory_info().rss)

    before = some_steps(40)
    assert some_steps(120) - before < 4 * 2**20


def test_the_limit_of_open_files_survives_mlx_lm() -> None:
    """In a process of its own: importing mlx-lm lowers the limit."""
    import subprocess
    import sys

    code = (
        "import resource; before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "import octavo.engine.model.startup\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == before, before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_info_is_what_was_loaded(runner: paged.PagedRunner, folder: Path, backend: str) -> None:
    info = runner.info
    assert (info.backend, info.tier, info.num_layers, info.num_pages) == (backend, "paged", 4, 40)
    assert (info.vocab_size, info.max_model_len, info.path) == (320, 512, folder)
    assert dataclasses.asdict(info)["architecture"] == "llama"
