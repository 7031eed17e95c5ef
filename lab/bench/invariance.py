"""``octavo bench invariance``: whether a request's output depends on anything but the request.

The requests are served alone, among others, in chunks, with several thread counts, from the prefix cache,
from disk, after preemption, and with drafts. Tokens and log probabilities must be bit-identical.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig, RequestFailed
from octavo.engine.api.outputs import FinishReason, RequestOutput
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.stats import StepRecord
from octavo.engine.arguments.options import add_engine_arguments, given_settings
from octavo.engine.arguments.usage import positive
from octavo.engine.frontend.llm import LLM

from .arguments import format_names

SEED = 7
PROMPT_TOKENS = (60, 90, 30, 20)
OUTPUT_TOKENS = 12
FEW_WORDS = 32
MATES = 30
CHUNKS = (9, 64)
POOL_PAGES = 256
FULL_WEIGHTS = ("keep", "bf16", "int8", "w8a8", "int4", "w4a8")
FULL_FORMATS: tuple[dict[str, Any], ...] = (
    {"kv_format": "bf16"},
    {"kv_format": "int8"},
    {"kv_format": "fp4", "residual_pages": 0},
    {"kv_format": "fp5/fp4", "residual_pages": 0},
    {"kv_format": "fp4"},
    {"kv_format": "fp5/fp4", "residual_pages": 1, "sink_pages": 1},
)

Bits: TypeAlias = tuple[tuple[int, ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token that differs from the output of the request alone."""

    settings: str
    case: str
    request: int
    token: int

    def __str__(self) -> str:
        return f"{self.settings}, {self.case}: request {self.request} differs from token {self.token} on"


@dataclass(slots=True)
class Report:
    cases: int = 0
    different: list[Difference] = field(default_factory=list)
    not_reached: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    add = parser.add_argument
    add("--mates", type=positive, default=MATES, metavar="N",
        help="number of other requests in the batch with the compared requests")  # fmt: skip
    add("--full", action="store_true", help="compare all formats of weights and pages, not one of each")
    add("--formats", type=format_names, metavar="F,F", help="page formats to compare, instead of --kv-format")


def run(args: argparse.Namespace) -> dict[str, Any]:
    report = Report()
    info: dict[str, Any] = {}
    for config in _configs(args):
        found, info = compare(config, num_mates=args.mates)
        name = describe(config)
        print(f"{name}: {found.cases} comparisons, {len(found.different)} different", flush=True)
        report.cases += found.cases
        report.different += found.different
        report.not_reached += [f"{name}: {case}" for case in found.not_reached]
    for line in (*map(str, report.different), *(f"not reached: {case}" for case in report.not_reached)):
        print(line)
    return {
        "bench": "invariance",
        **info,
        "cases": report.cases,
        "different": len(report.different),
        "differences": [str(difference) for difference in report.different],
        "not_reached": report.not_reached,
    }


def exit_code(result: dict[str, Any]) -> int:
    return 1 if result["different"] or not result["cases"] else 0


def _configs(args: argparse.Namespace) -> Iterator[EngineConfig]:
    given = given_settings(args)
    weights: Sequence[dict[str, Any]] = [{}]
    formats: Sequence[dict[str, Any]] = [{}]
    if args.full:
        weights, formats = [{"weights": name} for name in FULL_WEIGHTS], FULL_FORMATS
    if args.formats is not None:
        formats = [{"kv_format": name} for name in args.formats]
    for some, other in itertools.product(weights, formats):
        yield EngineConfig(**(given | some | other))


def describe(config: EngineConfig) -> str:
    pages = f"{config.weights} weights, {config.page_formats} pages"
    if (residual := config.residual) is None:
        return pages
    return f"{pages} with {residual.sink_pages}+{residual.residual_pages} 16-bit pages"


def compare(config: EngineConfig, *, num_mates: int = MATES) -> tuple[Report, dict[str, Any]]:
    report, name = Report(), describe(config)
    base = replace(
        config,
        num_pages=config.num_pages or (None if config.kv_memory else POOL_PAGES),
        max_step_tokens=max(config.max_step_tokens, config.max_running),
        cache_dir=None,
        prefix_cache=True,
    )
    with _served(base) as first:
        alone = [_bits(first.serve([index], [])[index]) for index in range(len(PROMPT_TOKENS))]
        first.leave_prefixes()
        again = [first.serve([index], [])[index] for index in range(len(PROMPT_TOKENS))]
        info: dict[str, Any] = {"model": first.llm.info.name, "backend": first.llm.info.backend}
        info["adapters"] = list(config.lora_paths)
        threads = first.llm.info.threads

    def check(case: str, outputs: Sequence[RequestOutput], reached: bool = True) -> None:
        if not reached:
            report.not_reached.append(case)
            return
        for index, output in enumerate(outputs):
            report.cases += 1
            if (token := first_difference(alone[index], _bits(output))) is not None:
                report.different.append(Difference(name, case, index, token))

    check("from the prefix cache", again, _any_cached(again))
    for case, changed in _ways(base, threads):
        with _served(changed) as served:
            outputs = served.serve_all(num_mates)
            check(f"{case}, among {num_mates}", outputs)
    for case, serve in (("preempted", _preempted), ("from the disk", _from_disk), ("with drafts", _drafted)):
        try:
            outputs, reached = serve(base)
        except InvalidConfig as error:
            report.not_reached.append(f"{case} ({error})")
        else:
            check(case, outputs, reached)
    return report, info


def _ways(base: EngineConfig, threads: int) -> Iterator[tuple[str, EngineConfig]]:
    yield "whole prompts", base
    for chunk in CHUNKS:
        running = min(base.max_running, chunk - 1)
        yield f"chunks of {chunk}", replace(base, max_step_tokens=chunk, max_running=running)
    for count in (1, 2, 3):
        if count != threads:
            yield f"{count} threads", replace(base, threads=count)


def _preempted(base: EngineConfig) -> tuple[list[RequestOutput], bool]:
    begun = sum(-(-tokens // base.page_size) for tokens in PROMPT_TOKENS)
    with _served(replace(base, kv_memory=None, num_pages=begun, prefix_cache=False)) as served:
        return served.serve_all(0), served.num_preemptions > 0


def _from_disk(base: EngineConfig) -> tuple[list[RequestOutput], bool]:
    with tempfile.TemporaryDirectory(prefix="octavo-invariance-") as folder:
        config = replace(base, cache_dir=Path(folder))
        with _served(config) as served:
            served.serve_all(0)
        with _served(config) as served:
            outputs = served.serve_all(0)
    return outputs, _any_cached(outputs)


def _drafted(base: EngineConfig) -> tuple[list[RequestOutput], bool]:
    with _served(replace(base, speculate="ngram")) as served:
        outputs = [served.serve([index], [])[index] for index in range(len(PROMPT_TOKENS))]
        return outputs, served.num_drafts > 0


def _any_cached(outputs: Sequence[RequestOutput]) -> bool:
    return any(output.cached_tokens for output in outputs)


class _Served:
    def __init__(self, config: EngineConfig) -> None:
        self.num_preemptions = 0
        self.num_drafts = 0
        self._adapters: tuple[str | None, ...] = (None, *config.lora_paths)
        self.llm = LLM(config, observer=self)

    def step(self, record: StepRecord) -> None:
        self.num_preemptions += record.preemptions
        self.num_drafts += sum(draft.num_drafts for draft in record.drafts)

    def rejected(self, reason: str) -> None: ...

    def serve(self, subjects: Sequence[int], batch_mates: Sequence[list[int]]) -> dict[int, RequestOutput]:
        size = self.llm.info.vocab_size
        half = len(batch_mates) // 2
        own = [(prompt(index, size), params(index, size), self._adapter(index)) for index in subjects]
        plain = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        other = [(ids, plain, self._adapter(index)) for index, ids in enumerate(batch_mates)]
        prompts, all_params, names = zip(*other[:half], *own, *other[half:], strict=True)
        outputs = self.llm.generate(list(prompts), list(all_params), adapter=names, progress=False)
        found = outputs[half : half + len(own)]
        for output in found:
            if output.outputs[0].finish_reason is FinishReason.ERROR:
                raise RequestFailed(f"a request failed: {output.outputs[0].error}")
        return dict(zip(subjects, found, strict=True))

    def _adapter(self, index: int) -> str | None:
        return self._adapters[index % len(self._adapters)]

    def leave_prefixes(self) -> None:
        page, size = self.llm.info.page_size, self.llm.info.vocab_size
        prompts = [prompt(index, size) for index in range(len(PROMPT_TOKENS))]
        begun = {
            i: ids[: (len(ids) - 1) // page * page + 1] for i, ids in enumerate(prompts) if len(ids) > page
        }
        if begun:
            names = [self._adapter(index) for index in begun]
            self.llm.generate(
                list(begun.values()), SamplingParams(max_tokens=1), adapter=names, progress=False
            )

    def serve_all(self, num_mates: int) -> list[RequestOutput]:
        found = self.serve(range(len(PROMPT_TOKENS)), batch_mates(num_mates, self.llm.info.vocab_size))
        return list(found.values())


@contextmanager
def _served(config: EngineConfig) -> Iterator[_Served]:
    served = _Served(config)
    with served.llm:
        yield served


def prompt(index: int, vocab_size: int) -> list[int]:
    ids: list[int] = (
        np.random.default_rng(SEED + index).integers(0, vocab_size, PROMPT_TOKENS[index]).tolist()
    )
    return ids


def batch_mates(count: int, vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(SEED - 1)
    return [rng.integers(0, vocab_size, int(rng.integers(1, 80))).tolist() for _ in range(count)]


def params(index: int, vocab_size: int) -> SamplingParams:
    """Return parameters of a request: greedy, sampled, with penalties, or limited to three token ids."""
    common: dict[str, Any] = {"ignore_eos": True, "logprobs": 5}
    few: dict[str, Any] = {
        "logit_bias": {token % vocab_size: 100.0 for token in (40, 41, 42)},
        "max_tokens": FEW_WORDS,
    }
    return (
        SamplingParams(**common, max_tokens=OUTPUT_TOKENS),
        SamplingParams(**common, max_tokens=OUTPUT_TOKENS, temperature=0.8, top_p=0.95, seed=11),
        SamplingParams(
            **common, max_tokens=OUTPUT_TOKENS, temperature=1.1, top_k=50, seed=12, repetition_penalty=1.2
        ),
        SamplingParams(**common, **few, temperature=2.0, seed=13, frequency_penalty=1.0),
    )[index]


def _bits(output: RequestOutput) -> Bits:
    sample = output.outputs[0]
    scores = ((entry.logprob, *(value for _, value in entry.top)) for entry in sample.logprobs)
    return tuple(sample.token_ids), tuple(" ".join(map(float.hex, values)) for values in scores)


def first_difference(one: Bits, other: Bits) -> int | None:
    """Return the index of the first token that differs, in id or log probability; None if all are equal."""
    pairs = zip(*map(list, (zip(*one, strict=True), zip(*other, strict=True))), strict=False)
    for index, (a, b) in enumerate(pairs):
        if a != b:
            return index
    return None if len(one[0]) == len(other[0]) else min(len(one[0]), len(other[0]))
