from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fakes import byte_tokenizer, fake_info, small_config
from ledger_runner import LedgerRunner
from octavo.block_manager import BlockManager
from octavo.engine.api.prompt import EncodedPrompt
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.core.build import assemble
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.core.request import Request, Sample
from octavo.engine.executor.base import RunOutput
from octavo.engine.executor.batch import Batch
from octavo.engine.executor.sampling.sampler import Sampled
from octavo.engine.frontend.input_processor import InputProcessor
from octavo.engine.speculation.draft_tables import Average, DraftRequest
from octavo.engine.speculation.drafting import Drafting
from octavo.engine.speculation.mtp_drafts import MTPDrafts
from octavo.engine.structured_output.constraint import Constraint
from octavo.scheduler import SchedulerOutput

LETTERS = StructuredOutput(regex="(ab)+c")


class Head:
    num_pages, page_size, max_model_len = 64, 4, 4096

    def __init__(self, note: Any) -> None:
        self.note = note

    def run(self, _batch: Batch, hidden: Any, states: Any) -> RunOutput:
        self.note(f"head reads {len(hidden)}, draws {len(states)}")
        return RunOutput(tuple(Sampled(97) for _ in states), hidden=np.full((len(states), 2), -1, np.float32))


class Drafts(MTPDrafts):
    def draft(self, asks: Iterable[DraftRequest]) -> list[tuple[int, ...]]:
        given = super().draft(asks)
        self.round_s = Average()
        self.round_s.add(1e-4)
        return given


class Traced:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, num_pages: int, max_step_tokens: int) -> None:
        self.lines: list[str] = []
        config = small_config(num_pages=num_pages, speculate="mtp", max_step_tokens=max_step_tokens)
        info = replace(fake_info(config), embeds=True)
        runner = LedgerRunner(info)
        drafts = Drafts(Head(self.note), BlockManager(64, 4, prefix_cache=False), max_tokens=32)
        ticks = itertools.count()
        self.core: EngineCore = assemble(
            config, runner, byte_tokenizer(), None, drafts, lambda: next(ticks) * 2e-3
        )
        self.core.drafts.speculation._max_drafts = 2
        self.admission = InputProcessor(
            info, self.core.tokenizer, capacity=self.core.capacity, grammars=self.core.builder.grammars
        )
        self.requests: list[Request] = []
        scheduler = self.core._scheduler
        plan, commit, submit, resolve = scheduler.plan, scheduler.commit, runner.submit, runner.resolve

        def noted_plan(now: float, *, spent_s: float) -> SchedulerOutput | None:
            step = plan(now, spent_s=spent_s)
            if step is not None:
                work = [f"{w.sequence.sequence_id}:{w.start}-{w.stop}+{len(w.drafts)}" for w in step.work]
                taken = "".join(f" without {each.sequence_id}" for each in step.preempted)
                self.note(f"plan {' '.join(work)}{taken}")
            return step

        def noted_commit(step: SchedulerOutput, results: Any) -> None:
            known = [
                f"{each.request_id} {len(each.prompt_scores)} scores, embedded: {bool(each.embedding)}"
                for each in self.requests
                if each.params.prompt_logprobs is not None or each.params.pooling is not None
            ]
            self.note(f"commit; {'; '.join(known)}")
            commit(step, results)

        def noted_submit(batch: Batch, *rest: Any) -> Any:
            scored = 0 if batch.scored is None else len(batch.scored.rows)
            hidden = 0 if batch.hidden is None else len(batch.hidden)
            self.note(f"submit {len(batch.token_ids)} rows, scored {scored}, hidden {hidden}")
            return submit(batch, *rest)

        def noted_resolve(step: Any) -> RunOutput:
            output = resolve(step)
            self.note("resolve")
            return output

        monkeypatch.setattr(scheduler, "plan", noted_plan)
        monkeypatch.setattr(scheduler, "commit", noted_commit)
        monkeypatch.setattr(runner, "submit", noted_submit)
        monkeypatch.setattr(runner, "resolve", noted_resolve)
        monkeypatch.setattr(Sample, "accept", self._noted(Sample.accept, self._accepted))
        monkeypatch.setattr(Constraint, "prepare", self._noted(Constraint.prepare, "prepare mask behind {}"))
        monkeypatch.setattr(Constraint, "completed", self._noted(Constraint.completed, "complete {}"))
        monkeypatch.setattr(Drafting, "finished", self._noted(Drafting.finished, "drafter is told of an end"))
        monkeypatch.setattr(Drafting, "search", self._noted(Drafting.search, "look"))
        monkeypatch.setattr(MTPDrafts, "record", self._noted(MTPDrafts.record, "head gets rows"))
        monkeypatch.setattr(MTPDrafts, "close", self._noted(MTPDrafts.close, "head forgets"))

    def note(self, line: str) -> None:
        self.lines.append(line)

    def _accepted(self, sample: Sample, _: Sampled) -> str:
        return f"accept {sample.sequence.sequence_id}"

    def _noted(self, function: Any, line: Any) -> Any:
        def noted(each: Any, *args: Any) -> Any:
            shown = [list(arg) if isinstance(arg, tuple | list) else "rows" for arg in args[:1]]
            if args:
                self.note(line(each, *args) if callable(line) else line.format(*shown))
            return function(each, *args)

        return noted

    def add(self, request_id: str, prompt: bytes, params: SamplingParams, **options: Any) -> None:
        grammar = self.admission.compile(params)
        data = self.admission.admit(
            EncodedPrompt(list(prompt)), params, request_id=request_id, grammar=grammar, **options
        )
        request = self.core.builder.build(data)
        self.requests.append(request)
        self.core.add(request)

    def run(self) -> list[str]:
        while self.core.has_work:
            self.core.step()
            self.core._blocks.check()
        self.core.builder.grammars.close()
        return self.lines


def params(**changes: Any) -> SamplingParams:
    return replace(SamplingParams(max_tokens=6, temperature=0, ignore_eos=True), **changes)


def test_parts_of_a_step_meet_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch, num_pages=12, max_step_tokens=16)
    traced.add("text", b"abababab", params(max_tokens=10, speculate="ngram"), salt=b"t")
    traced.add("grammar", b"cc", params(max_tokens=5, structured=LETTERS), salt=b"g")
    scored = params(max_tokens=3, prompt_logprobs=1, speculate="off")
    traced.add("score", b"abcabcab" * 3, scored, salt=b"s", priority=1)
    traced.add("mean", b"abcababcab", params(max_tokens=1, pooling="mean"), salt=b"m", priority=1)
    traced.add("young", b"bbbbbb", params(max_tokens=4), salt=b"y", priority=2)
    assert traced.run() == ORDER.split("\n")[1:-1]


ORDER = """
plan text/0:0-8+0 grammar/0:0-2+0 score/0:0-3+0 mean/0:0-3+0
submit 16 rows, scored 3, hidden 5
resolve
head gets rows
accept text/0
accept grammar/0
commit; score 3 scores, embedded: False; mean 0 scores, embedded: False
head reads 2, draws 1
head reads 1, draws 1
look
look
complete [97, 97]
prepare mask behind [98]
plan text/0:8-9+0 grammar/0:2-3+0 score/0:3-17+0 without mean/0
submit 16 rows, scored 14, hidden 1
resolve
head gets rows
accept text/0
accept grammar/0
commit; score 17 scores, embedded: False; mean 0 scores, embedded: False
head reads 1, draws 1
head reads 1, draws 1
look
look
complete [97, 97]
prepare mask behind [97, 98]
plan text/0:9-10+0 grammar/0:3-4+2 score/0:17-24+0
submit 11 rows, scored 6, hidden 3
resolve
head gets rows
accept text/0
accept grammar/0
head forgets
accept score/0
commit; score 23 scores, embedded: False; mean 0 scores, embedded: False
drafter is told of an end
look
plan text/0:10-11+0 score/0:24-25+0
submit 2 rows, scored 0, hidden 0
resolve
accept text/0
accept score/0
commit; score 23 scores, embedded: False; mean 0 scores, embedded: False
look
plan text/0:11-12+0 score/0:25-26+0
submit 2 rows, scored 0, hidden 0
resolve
accept text/0
accept score/0
commit; score 23 scores, embedded: False; mean 0 scores, embedded: False
look
plan text/0:12-13+0 mean/0:0-10+0 young/0:0-5+0
submit 16 rows, scored 0, hidden 15
resolve
head gets rows
accept text/0
accept mean/0
head forgets
commit; score 23 scores, embedded: False; mean 0 scores, embedded: True
drafter is told of an end
look
plan text/0:13-14+0 young/0:5-6+0
submit 2 rows, scored 0, hidden 1
resolve
head gets rows
accept text/0
accept young/0
commit; score 23 scores, embedded: False; mean 0 scores, embedded: True
head reads 6, draws 1
head reads 1, draws 1
look
look
plan text/0:14-15+0 young/0:6-7+2
submit 4 rows, scored 0, hidden 3
resolve
head gets rows
accept text/0
accept young/0
commit; score 23 scores, embedded: False; mean 0 scores, embedded: True
look
look
plan text/0:15-16+0 young/0:7-8+0
submit 2 rows, scored 0, hidden 1
resolve
head gets rows
accept text/0
accept young/0
commit; score 23 scores, embedded: False; mean 0 scores, embedded: True
look
look
plan text/0:16-17+0 young/0:8-9+0
submit 2 rows, scored 0, hidden 1
resolve
head gets rows
accept text/0
accept young/0
head forgets
commit; score 23 scores, embedded: False; mean 0 scores, embedded: True
drafter is told of an end
drafter is told of an end
"""
