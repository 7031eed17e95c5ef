"""``octavo bench speculate``: tokens per second with and without drafts, interleaved in one engine.

The text is dictated. The model computes every row and samples every token; the next token of a given text
then replaces the sampled one. So steps of any model can be timed on any text. Drafts of a draft model or MTP
head are timed on text that the model generates.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from octavo.engine.api.config import MAX_DRAFTS, EngineConfig
from octavo.engine.api.errors import InvalidConfig, RequestFailed
from octavo.engine.api.sampling_params import SamplingParams, Speculate
from octavo.engine.api.stats import DraftRecord, Observer, StepRecord
from octavo.engine.arguments.options import add_engine_arguments, given_settings
from octavo.engine.arguments.usage import counts, positive
from octavo.engine.core.build import build_core
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.executor.base import ModelRunner, Pending, Resolved, RunOutput
from octavo.engine.executor.batch import Batch
from octavo.engine.executor.sampling.sampler import SampleState
from octavo.engine.structured_output.compiler import ConstraintCompiler
from octavo.engine.structured_output.constraint import Constraint

from ..plots.figure import require_matplotlib
from .draft_texts import OWN, TEXTS, Dictated
from .drive import request_of, step_of

SEED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument(
        "--batch", type=counts, default="1,8", metavar="N,N", help="numbers of sequences in a batch"
    )
    parser.add_argument(
        "--prompt-tokens", type=positive, default=256, metavar="N", help="number of tokens of each prompt"
    )
    parser.add_argument("--output-tokens", type=positive, default=128, metavar="N",
        help="number of tokens to generate per sequence")  # fmt: skip
    parser.add_argument(
        "--rounds", type=positive, default=3, metavar="N", help="number of rounds for each kind of text"
    )
    parser.add_argument("--texts", metavar="T,T", help=f"kinds of text: {', '.join(TEXTS)} (own is the "
    "model's own; default: own for mtp and draft models, every other kind for the rest)")  # fmt: skip
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="image file for a plot of the ratios (needs matplotlib)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    require_matplotlib(args.plot)
    settings = given_settings(args)
    speculate: str = settings.setdefault("speculate", "ngram")
    by_model = speculate == "mtp" or speculate.startswith("draft")
    texts = args.texts.split(",") if args.texts else [OWN] if by_model else [n for n in TEXTS if n != OWN]
    if unknown := set(texts) - TEXTS.keys():
        raise InvalidConfig(f"no text is called {min(unknown)!r}; choose from {', '.join(TEXTS)}")
    if speculate == "off":
        raise InvalidConfig(
            "speculate must not be off in a benchmark of drafts; leave it out, or set ngram, suffix, mtp or "
            "draft:PATH"
        )
    if by_model and texts != [OWN]:
        raise InvalidConfig(
            f"texts must be {OWN} with speculate {speculate}, because no model predicts dictated text; leave "
            "--texts out"
        )
    counter = DraftCounter()
    config = _config(settings, args)
    core = build_core(config, counter)
    try:
        info = core.info
        rows = _measure(core, counter, args, texts)
    finally:
        core.close()
    result = {
        "bench": "speculate",
        "model": info.name,
        "backend": info.backend,
        "threads": info.threads,
        "weights": info.weights,
        "kv_format": info.kv_format,
        "speculate": speculate,
        "draft_tokens": MAX_DRAFTS,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "cases": _cases(rows),
        "results": rows,
    }
    _print_table(result)
    if args.plot is not None:
        from ..plots.speculate import plot

        plot(result, args.plot)
    return result


class _Rate(NamedTuple):
    tokens_per_s: float
    tokens_per_cpu_s: float


class DraftCounter(Observer):
    def __init__(self) -> None:
        self.drafts: list[DraftRecord] = []

    def step(self, record: StepRecord) -> None:
        self.drafts += record.drafts

    def rejected(self, reason: str) -> None:
        raise RequestFailed(f"the benchmark's request was refused: {reason}")


class ScriptedRunner:
    """A runner that replaces sampled tokens by the tokens of given texts."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.texts: Mapping[int, Sequence[int]] = {}

    def submit(self, batch: Batch, states: Sequence[SampleState], after: Pending | None = None) -> Pending:
        assert after is None, "what is dictated is known only when a step is resolved"
        return Resolved(self._run(batch, states))

    def _run(self, batch: Batch, states: Sequence[SampleState]) -> RunOutput:
        output = self._runner.run(batch, states)
        told = [
            sampled._replace(token=self._next(state))
            if sampled.token is not None and state.seed in self.texts
            else sampled
            for sampled, state in zip(output.samples, states, strict=True)
        ]
        return output._replace(samples=tuple(told))

    def _next(self, state: SampleState) -> int:
        text = self.texts[state.seed]
        return text[state.num_generated % len(text)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def _config(settings: dict[str, Any], args: argparse.Namespace) -> EngineConfig:
    largest = max(args.batch)
    config = EngineConfig(
        **{"prefix_cache": False, "max_running": largest, "max_step_tokens": max(512, largest), **settings}
    )
    if config.num_pages is not None or config.kv_memory is not None:
        return config
    pages = -(-(args.prompt_tokens + args.output_tokens) // config.page_size) + 1
    return replace(config, num_pages=largest * pages)


def _measure(
    core: EngineCore, counter: DraftCounter, args: argparse.Namespace, texts: list[str]
) -> list[dict[str, Any]]:
    dictation = ScriptedRunner(core._runner)
    core._runner = dictation
    rng = np.random.default_rng(SEED)
    rows = []
    with (
        closing(ConstraintCompiler(core.tokenizer, vocab_size=core.info.vocab_size)) as compiler,
        tqdm(total=len(texts) * len(args.batch) * args.rounds, unit="round", disable=None) as bar,
    ):
        for name in texts:
            structured = TEXTS[name].structured
            form = None if structured is None else compiler.compile(structured)
            for batch in args.batch:
                rates: dict[Speculate | None, list[_Rate]] = {"off": [], None: []}
                counter.drafts.clear()
                for number in range(args.rounds):
                    work = _waves(name, batch, rng, core, args)
                    order: tuple[Speculate | None, ...] = ("off", None)
                    for how in order if number % 2 else order[::-1]:
                        rates[how].append(_rate(core, dictation, work, how, form, args.output_tokens))
                    bar.update()
                rows.append(_row(name, batch, rates["off"], rates[None], counter.drafts))
    return rows


def _waves(
    name: str, batch: int, rng: np.random.Generator, core: EngineCore, args: argparse.Namespace
) -> list[list[Dictated]]:
    waves: list[list[Dictated]] = []
    num_tokens = 0
    while not waves or num_tokens < batch * args.output_tokens:
        wave = []
        for _ in range(batch):
            prompt: list[int] = rng.integers(300, core.info.vocab_size, args.prompt_tokens).tolist()
            wave.append(TEXTS[name].make(rng, prompt, args.output_tokens, core))
        waves.append(wave)
        num_tokens += sum(len(text) or args.output_tokens for _, text in wave)
    return waves


def _rate(
    core: EngineCore,
    dictation: ScriptedRunner,
    waves: list[list[Dictated]],
    how: Speculate | None,
    form: Constraint | None,
    most: int,
) -> _Rate:
    served = [_serve(core, dictation, work, how, form, most) for work in waves]
    num_tokens, seconds, cpu_seconds = (sum(each) for each in zip(*served, strict=True))
    return _Rate(num_tokens / seconds, num_tokens / cpu_seconds)


def _serve(
    core: EngineCore,
    dictation: ScriptedRunner,
    work: list[Dictated],
    how: Speculate | None,
    form: Constraint | None,
    most: int,
) -> tuple[float, float, float]:
    dictation.texts = {index: text for index, (_, text) in enumerate(work) if text}
    waiting = set()
    for index, (prompt, text) in enumerate(work):
        length = min(most, len(text) or most)
        params = SamplingParams(max_tokens=length, ignore_eos=True, seed=index, speculate=how)
        constraint = None if form is None else form.copy()
        request = request_of(core, prompt, params, request_id=f"{how}/{index}", constraint=constraint)
        core.add(request)
        waiting.add(request)
    while waiting:
        waiting -= {request for request, _ in step_of(core)}
    began, cpu_began, num_tokens = time.perf_counter(), time.process_time(), 0
    while core.has_work:
        num_tokens += sum(len(tokens) for _, tokens in step_of(core))
    return num_tokens, time.perf_counter() - began, time.process_time() - cpu_began


def _row(
    name: str, batch: int, plain: list[_Rate], drafted: list[_Rate], drafts: list[DraftRecord]
) -> dict[str, Any]:
    num_drafts, num_accepted = sum(d.num_drafts for d in drafts), sum(d.num_accepted for d in drafts)
    pairs = list(zip(plain, drafted, strict=True))
    ratios = [after.tokens_per_s / before.tokens_per_s for before, after in pairs]
    return {
        "text": name,
        "batch": batch,
        "off_tokens_per_s": statistics.median(rate.tokens_per_s for rate in plain),
        "tokens_per_s": statistics.median(rate.tokens_per_s for rate in drafted),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "cpu_ratio": statistics.median(
            after.tokens_per_cpu_s / before.tokens_per_cpu_s for before, after in pairs
        ),
        "accepted_share": num_accepted / num_drafts if num_drafts else None,
        "mean_acceptance_length": 1 + num_accepted / len(drafts) if drafts else 1.0,
    }


def _cases(rows: list[dict[str, Any]]) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for row in rows:
        case = cases.setdefault(
            row["text"], {"speedup": {}, "accepted_length": row["mean_acceptance_length"]}
        )
        case["speedup"][str(row["batch"])] = row["ratio"]
    return cases


def _print_table(result: dict[str, Any]) -> None:
    print(
        f"{result['model']}: {result['weights']} weights, {result['kv_format']} pages, backend "
        f"{result['backend']}, {result['threads']} threads; {result['speculate']}, at most "
        f"{result['draft_tokens']} drafts"
    )
    print(
        "text         batch  off, tokens/s  drafts, tokens/s  ratio  by CPU time  held  "
        "tokens of a step with drafts"
    )
    for row in result["results"]:
        held = "-" if row["accepted_share"] is None else f"{100 * row['accepted_share']:.0f} %"
        print(
            f"{row['text']:12s} {row['batch']:5d} {row['off_tokens_per_s']:14.1f} "
            f"{row['tokens_per_s']:17.1f} "
            f"{row['ratio']:6.2f} {row['cpu_ratio']:12.2f} {held:>5s} {row['mean_acceptance_length']:10.2f}"
        )
