from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import recurrent_models
from native import require_extension
from octavo.engine import LLM
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core import build
from octavo.engine.executor.batch import Batch, OutputSelection
from octavo.engine.executor.capture.graph_runner import GraphRunner
from octavo.engine.executor.load import load as startup
from octavo.engine.executor.load import load_runner
from octavo.engine.executor.load.load import load_paged_runner
from octavo.engine.executor.load.prepare import make_ready
from octavo.engine.executor.model_runner import PagedRunner
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata, StateMetadata

require_extension()

PAGE_SIZE = 8
NUM_SEQUENCES = 3
PAGES_EACH = 8
MODELS = [
    ("qwen3_5", mx.float32),
    ("mamba2", mx.bfloat16),
    ("mamba", mx.float32),
    ("rwkv7", mx.bfloat16),
    ("baichuan_m1", mx.float32),
    pytest.param("falcon_h1", mx.bfloat16, marks=pytest.mark.slow),
]


def load(folder: Path, **changes: object) -> PagedRunner:
    settings: dict[str, object] = {
        "page_size": PAGE_SIZE, "num_pages": 64, "max_running": 4, "max_step_tokens": 16, "max_model_len": 64,
        "state_memory": 2**21, "backend": "cpu", "threads": 1,
    }  # fmt: skip
    return load_paged_runner(EngineConfig(model=str(folder), **settings | changes))  # type: ignore[arg-type]


class Driver:
    def __init__(self, runner: PagedRunner, seed: int = 3) -> None:
        self.model = runner._model
        assert self.model.states is not None
        self.states = self.model.states
        self.at = [0] * NUM_SEQUENCES
        self.slots = list(range(NUM_SEQUENCES))
        self.vocab_size = runner.info.vocab_size
        self.tokens = np.random.default_rng(seed).integers(0, 300, (NUM_SEQUENCES, 64)).astype(np.int32)
        self.num_groups = max(1, len(runner.info.groups))

    def step(
        self, counts: dict[int, int], snapshots: tuple[tuple[int, int, int], ...] = ()
    ) -> list[list[float]]:
        ranges = [range(self.at[s], self.at[s] + count) for s, count in counts.items()]
        tables = [range(1 + s * PAGES_EACH, 1 + (s + 1) * PAGES_EACH) for s in counts]
        slots = [
            t[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE
            for r, t in zip(ranges, tables, strict=True)
            for p in r
        ]
        starts = np.cumsum([0, *counts.values()]).astype(np.int32)
        group = GroupMetadata(
            slots=np.array(slots, np.int32), page_table=np.array([list(t) for t in tables], np.int32)
        )
        metadata = AttentionMetadata(
            positions=np.array([p for r in ranges for p in r], np.int32),
            q_start=starts,
            kv_len=np.array([r.stop for r in ranges], np.int32),
            groups=(group,) * self.num_groups,
            page_size=PAGE_SIZE,
            states=StateMetadata(
                slots=np.array([self.slots[s] for s in counts], np.int32),
                snapshots=np.array(snapshots, np.int32).reshape(-1, 3),
            ),
        )
        ids = np.concatenate([self.tokens[s, r.start : r.stop] for s, r in zip(counts, ranges, strict=True)])
        rows = starts[1:] - np.int32(1)
        (logits,) = self.model.forward(Batch(ids, rows, metadata), OutputSelection(rows)).arrays
        self.model.evaluate([logits])
        for s, count in counts.items():
            self.at[s] += count
        return np.array(logits.astype(mx.float32)).tolist()  # type: ignore[no-any-return]


def drive(driver: Driver) -> Iterator[list[list[float]]]:
    states = driver.states
    yield driver.step({0: 5, 1: 9})
    yield driver.step({0: 1, 1: 1, 2: 4})
    for at in range(5):
        yield driver.step({0: 1})
        yield driver.step({0: 1, 1: 1, 2: 1}, ((1, driver.at[1] + 1, 4),) if at == 1 else ())
    states.copy_pages([(driver.slots[0], 5)])
    driver.slots[0] = 5
    yield driver.step({0: 1})
    yield driver.step({0: 1, 1: 1, 2: 1})
    saved = states.read_pages([driver.slots[2]])
    here = driver.at[2]
    yield driver.step({2: 1})
    again = driver.step({2: 1})
    yield again
    states.write_pages([6], saved)
    driver.slots[2], driver.at[2] = 6, here
    yield driver.step({2: 1})
    assert driver.step({2: 1}) == again
    driver.slots[1], driver.at[1] = 4, driver.at[1] - 4
    yield driver.step({1: 4})
    driver.at[1], driver.slots[1] = 0, 1
    yield driver.step({1: 1})
    yield driver.step({0: 1, 1: 1, 2: 1})
    yield driver.step({0: 3, 1: 2}), driver.step({0: 3, 1: 2})  # type: ignore[misc]


@pytest.mark.parametrize(("name", "dtype"), MODELS)
@pytest.mark.few(3)
def test_a_program_gives_the_bits_of_the_models_code(name: str, dtype: mx.Dtype, tmp_path: Path) -> None:
    folder = recurrent_models.make_folder(tmp_path / "model", name, dtype)
    recorded, plain = load(folder), load(folder)
    assert recorded._model.graph_runner is not None, "steps are not replayed"
    plain._model.graph_runner = None
    got, wanted = list(drive(Driver(recorded))), list(drive(Driver(plain)))
    assert recorded._model.graph_runner.num_replayed > 10
    assert got == wanted
    states = [runner._model.states for runner in (recorded, plain)]
    for slot in (1, 5, 6):
        a, b = (pool.read_pages([slot]) for pool in states if pool is not None)
        assert np.array_equal(a, b), f"slot {slot}"


def test_a_step_that_is_replayed_cannot_advance_a_state_twice(tmp_path: Path) -> None:
    runner = load(recurrent_models.make_folder(tmp_path / "model", "mamba2"))
    driver = Driver(runner)
    driver.step({0: 2})
    for _ in range(3):
        driver.step({0: 1})
    assert driver.model.graph_runner is not None
    assert driver.model.graph_runner.is_computed
    driver.at[0] -= 1
    with pytest.raises(ValueError, match="restore the slots before you compute a step again"):
        driver.step({0: 1})


def test_operations_that_write_states_are_not_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = load(recurrent_models.make_folder(tmp_path / "model", "longcat_flash_ngram"))
    said = "in every step, which is slower: MLX operations write some states"
    assert said in caplog.text
    assert runner._model.graph_runner is None
    driver = Driver(runner)
    driver.step({0: 2})
    assert np.isfinite(driver.step({0: 1})).all()


@pytest.mark.parametrize("weights", ["keep", "int8"])
@pytest.mark.few(1)
def test_requests_get_the_same_tokens_and_scores(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recurrent_models.make_folder(tmp_path / "model", "qwen3_5", mx.bfloat16)
    prompts = np.random.default_rng(5).integers(0, 300, (4, 19)).tolist()
    prompts.append([*prompts[0], *prompts[1], *prompts[0]])
    replays: list[GraphRunner | None] = []

    def keep(config: EngineConfig, **options: Any) -> PagedRunner:
        runner = load_runner(config, **options)
        assert isinstance(runner, PagedRunner)
        replays.append(runner._model.graph_runner)
        return runner

    monkeypatch.setattr(build, "load_runner", keep)
    greedy = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True, logprobs=2)
    sampled = SamplingParams(max_tokens=9, temperature=2.0, seed=4, n=2, ignore_eos=True, logprobs=1)

    def serve(**changes: object) -> list[object]:
        settings: dict[str, object] = {
            "page_size": PAGE_SIZE, "num_pages": 96, "max_running": 6, "max_step_tokens": 16,
            "max_model_len": 128, "state_memory": 2**21, "backend": "cpu", "weights": weights, "threads": 1,
        }  # fmt: skip
        with LLM(EngineConfig(model=str(folder), **settings | changes)) as llm:  # type: ignore[arg-type]
            alone = [llm.generate([prompt], greedy, progress=False)[0] for prompt in prompts]
            both = llm.generate([*prompts, prompts[0]], [greedy] * 5 + [sampled], progress=False)
        assert [o.outputs for o in both[:5]] == [o.outputs for o in alone]
        return [o.outputs for o in both]

    with monkeypatch.context() as unfused:
        unfused.setattr(startup, "make_ready", functools.partial(make_ready, fuse=False))
        plain = serve()
    assert replays[-1] is None
    for changes in ({}, {"threads": 2, "max_step_tokens": 7}, {"speculate": "ngram"}):
        assert serve(**changes) == plain, changes
        replay = replays[-1]
        assert replay is not None
        assert replay.num_replayed > 10, changes
