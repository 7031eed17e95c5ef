from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from native import require_extension
from octavo.engine import LLM, EngineConfig, SamplingParams
from octavo.engine.core.build import build_core
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.executor.recurrent.segments import StateStep
from octavo.engine.executor.recurrent.state_pool import StatePool
from octavo_lab.bench.ledgers.documents import held_out

require_extension()

# 24 ledgers that were not in the training data.
LEDGERS = [ledger for ledger in held_out(96, 96) if ledger.kind == "Codes"]
# Earlier questions with their answers, then the last question.
PROMPTS = [ledger.prompts()[-1] for ledger in LEDGERS]
ANSWERS = [ledger.turns[-1].answer for ledger in LEDGERS]
PARAMS = SamplingParams(max_tokens=40, temperature=0)


class Asked:
    def __init__(self, **changes: Any) -> None:
        self.cores: list[EngineCore] = []
        settings: dict[str, Any] = {
            "page_size": 16, "num_pages": 512, "state_memory": 2**24, "max_running": 6, "backend": "cpu",
            "target_itl": "off",
        }  # fmt: skip
        self.llm = LLM(EngineConfig(model="demo-hybrid", **settings | changes), core_factory=self._remember)

    def _remember(self, config: EngineConfig, observer: object = None) -> EngineCore:
        self.cores.append(build_core(config, observer))  # type: ignore[arg-type]
        return self.cores[0]

    def ask(self, prompts: Sequence[str] = PROMPTS) -> list[str]:
        outputs = self.llm.generate(list(prompts), PARAMS, progress=False)
        self.cached = [output.cached_tokens for output in outputs]
        return [output.outputs[0].text for output in outputs]

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()


def warm(engine: Asked) -> None:
    engine.ask()
    engine.ask()


def share_right(said: list[str]) -> float:
    return sum(a == b for a, b in zip(said, ANSWERS, strict=True)) / len(ANSWERS)


@pytest.fixture(scope="module")
def alone() -> list[str]:
    with Asked(prefix_cache=False, max_running=1) as engine:
        return engine.ask()


def test_answers_are_right(alone: list[str]) -> None:
    assert share_right(alone) >= 0.9


def test_answers_do_not_depend_on_how_a_prompt_is_computed(alone: list[str]) -> None:
    with Asked() as engine:
        warm(engine)
        assert engine.ask() == alone, "from snapshots"
        assert min(engine.cached) > 0
    with Asked(max_step_tokens=7) as engine:
        assert engine.ask() == alone, "in chunks of at most 7 tokens"
    with Asked(page_size=4, num_pages=40) as engine:
        assert engine.ask() == alone, "in a pool that is too small"
        assert engine.cores[0]._scheduler.num_preemptions > 0, "nobody was short of pages"


def test_answers_are_the_same_with_drafts_and_from_disk(alone: list[str], tmp_path: Path) -> None:
    with Asked(speculate="ngram") as engine:
        assert engine.ask() == alone, "with drafts"
    for restart in (False, True):
        with Asked(cache_dir=tmp_path) as engine:
            assert engine.ask() == alone, "from states on disk" if restart else "while they are written"
            assert (min(engine.cached) > 0) >= restart
            if not restart:
                assert engine.ask() == alone


def test_of_a_warm_prompt_less_than_a_tenth_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    begin = StatePool.begin_step

    def counting(pool: StatePool, step: StateStep) -> None:
        rows[-1] += step.num_rows
        begin(pool, step)

    turn = [1 + number % 200 for number in range(4100)]
    with Asked(num_pages=600, max_model_len=4300, max_running=1) as engine:
        monkeypatch.setattr(StatePool, "begin_step", counting)
        for prompt in (turn, [*turn, *range(30)]):
            rows.append(0)
            params = SamplingParams(max_tokens=1, ignore_eos=True)
            engine.llm.generate([prompt], params, progress=False)
    cold, warm = rows
    assert cold == len(turn)
    assert 0 < warm <= cold / 10


def swap_with_last() -> Callable[[StatePool, Sequence[tuple[int, int]]], None]:
    original, held = StatePool.copy_pages, []

    def copy(pool: StatePool, pairs: Sequence[tuple[int, int]]) -> None:
        original(pool, pairs)
        for _, slot in pairs:
            held.append(pool._rows((slot,)))
            if len(held) > 1:
                pool._put((slot,), held[-2], [int(pool._positions[slot])])

    return copy


def empty() -> Callable[[StatePool, Sequence[tuple[int, int]]], None]:
    original = StatePool.copy_pages

    def copy(pool: StatePool, pairs: Sequence[tuple[int, int]]) -> None:
        original(pool, pairs)
        for _, slot in pairs:
            rows = {name: mx.zeros_like(row) for name, row in pool._rows((slot,)).items()}
            pool._put((slot,), rows, [int(pool._positions[slot])])

    return copy


@pytest.mark.parametrize("bug", [swap_with_last, empty])
def test_wrong_states_are_wrong_answers(
    bug: Callable[[], Any], alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Asked(max_running=1) as engine:
        warm(engine)
        monkeypatch.setattr(StatePool, "copy_pages", bug())
        wrong = engine.ask()
        assert min(engine.cached) > 0
        assert share_right(wrong) < 0.5 < share_right(alone)
