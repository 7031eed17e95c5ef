from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from core_harness import Harness
from fakes import small_config
from octavo.block_manager import RecurrentState
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.build import drafts_by
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.executor.base import Pending, Resolved
from octavo.engine.executor.batch import Batch
from octavo.engine.executor.sampling.sampler import Sampled, SampleState

TEXT = b"the same words again and again: "


class Parrot:
    def __init__(self, core: EngineCore, *, fails_at: int | None = None) -> None:
        self._runner = core._runner
        self._fails_at = fails_at
        self.num_rows: list[int] = []
        self.now = 0.0

    def submit(self, batch: Batch, states: list[SampleState], after: Pending | None = None) -> Pending:
        output = self._runner.submit(batch, states, after).resolve()
        self.num_rows.append(len(batch.token_ids))
        self.now += len(batch.token_ids) ** 2
        samples = []
        for sampled, state in zip(output.samples, states, strict=True):
            assert sampled.token is not None
            at = state.num_generated
            failed = self._fails_at is not None and at >= self._fails_at
            samples.append(Sampled(None, error="broken") if failed else Sampled(TEXT[at % len(TEXT)]))
        return Resolved(output._replace(samples=tuple(samples)))

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)


def parrot(**options: object) -> tuple[Harness, Parrot]:
    harness = Harness(small_config(page_size=4, num_pages=64, max_step_tokens=32, **options))
    runner = Parrot(harness.core)
    harness.core._runner = runner  # type: ignore[assignment]
    return harness, runner


def test_repetitive_texts_take_fewer_steps() -> None:
    harness, runner = parrot(speculate="ngram")
    request = harness.add(TEXT, SamplingParams(max_tokens=64))
    harness.run()
    assert bytes(harness.result(request).token_ids) == TEXT * 2
    assert len(runner.num_rows) < 64 / 3
    harness.assert_idle()


def test_drafts_that_cost_more_than_they_save_are_given_up() -> None:
    harness, runner = parrot(speculate="ngram")
    harness.core._clock = lambda: runner.now
    for _ in range(2):
        harness.add(TEXT, SamplingParams(max_tokens=64))
        harness.run()
    harness.add(TEXT, SamplingParams(max_tokens=64))
    before = len(runner.num_rows)
    harness.run()
    assert len(runner.num_rows) - before > 48


def test_a_request_may_choose_another_kind_of_drafts() -> None:
    for engine, own, drafts in (("ngram", "off", False), ("off", "ngram", True), ("off", None, False)):
        harness, runner = parrot(speculate=engine)
        harness.add(TEXT, SamplingParams(max_tokens=40, speculate=own))  # type: ignore[arg-type]
        harness.run()
        assert (max(runner.num_rows[1:]) > 1) is drafts
    with pytest.raises(InvalidRequest, match="speculate must be one of off, ngram"):
        SamplingParams(speculate="magic")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("speculate", "invariant", "is_recurrent", "expected"),
    [
        ("auto", True, False, "ngram"),
        ("auto", False, False, "off"),
        ("auto", True, True, "off"),
        ("suffix", False, True, "suffix"),
        ("off", True, False, "off"),
        ("draft:model", True, False, "off"),
        ("mtp", True, False, "off"),
    ],
)
def test_default_source_of_drafts(speculate: str, invariant: bool, is_recurrent: bool, expected: str) -> None:
    states = RecurrentState(num_slots=4, slot_bytes=64) if is_recurrent else None
    info = Harness(small_config()).core.info
    info = replace(info, batch_invariant=invariant, states=states)
    assert drafts_by(EngineConfig(speculate=speculate), info) == expected


def test_a_failed_draft_row_ends_the_request() -> None:
    harness, runner = parrot(speculate="ngram")
    runner._fails_at = 21
    request = harness.add(TEXT, SamplingParams(max_tokens=60))
    other = harness.add(b"another", SamplingParams(max_tokens=9))
    harness.run()
    result = harness.result(request)
    assert result.finish_reason is FinishReason.ERROR
    assert bytes(result.token_ids) == TEXT[:21]
    assert harness.result(other).finish_reason is FinishReason.LENGTH
    harness.assert_idle()


def test_rejected_drafts_publish_nothing() -> None:
    harness = Harness(small_config(page_size=2, num_pages=128, speculate="ngram"))
    blocks = harness.core._blocks
    blocks.keep_tokens()
    request = harness.add(b"abcabcabcabc", SamplingParams(max_tokens=200))
    harness.run()
    said = [*b"abcabcabcabc", *harness.result(request).token_ids]
    pages = [bytes(c.tokens) for c in blocks.cached_contents().values()]
    assert len(pages) == (len(said) - 1) // 2
    assert blocks.open(said).num_written == (len(said) - 1) // 2 * 2


def test_drafts_get_the_tokens_that_prompts_leave() -> None:
    harness, runner = parrot(speculate="ngram")
    harness.add(TEXT * 2, SamplingParams(max_tokens=60))
    for _ in range(4):
        harness.step()
    assert runner.num_rows[-1] > 1
    harness.add(b"x" * 90, SamplingParams(max_tokens=2))
    harness.step()
    assert runner.num_rows[-1] == 32
    assert harness.observer.records[-1].prefill_tokens == 31
    harness.run()
    harness.assert_idle()


def test_statistics_count_each_token_once() -> None:
    harness, _ = parrot(speculate="ngram")
    harness.add(TEXT, SamplingParams(max_tokens=50))
    harness.run()
    records = harness.observer.records
    assert sum(record.generated_tokens for record in records) == 50
    assert sum(record.decode_tokens for record in records) == len(records) - 1, "steps, not drafts"


def test_pages_that_drafts_filled_are_kept_on_disk(tmp_path: Path) -> None:
    harness, runner = parrot(speculate="ngram", cache_dir=tmp_path)
    harness.add(TEXT, SamplingParams(max_tokens=61))
    harness.run()
    assert max(runner.num_rows[1:]) > 4, "a step fills more than a page"
    harness.core.close()
    assert len(list(tmp_path.rglob("*.safetensors"))) == (len(TEXT) + 60) // 4
