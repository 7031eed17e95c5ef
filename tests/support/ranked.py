"""Greedy tokens of one engine over several ranks, in a new process because MLX has one group each.

    python ranked.py MODEL [SETTINGS]

SETTINGS and the output are JSON."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from computed_drafts import compute_every_draft
from draft_checks import Drafts
from octavo.engine import LLM, EngineConfig, SamplingParams
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.core.build import build_core
from octavo.engine.core.engine_core import EngineCore
from octavo_lab.architectures.configurations import configuration
from tiny_models import VOCAB_SIZE, make_model

PROMPTS = [
    [(7 * i * (n + 1) + n) % 250 for i in range(length)] for n, length in enumerate((3, 40, 17, 70, 40))
]
SETTINGS: dict[str, Any] = {
    "threads": 1, "num_pages": 64, "page_size": 8, "max_running": 4, "max_step_tokens": 32,
}  # fmt: skip


def tiny(folder: Path, name: str, dtype: mx.Dtype = mx.float32, **more: int) -> Path:
    arguments = importlib.import_module(f"mlx_lm.models.{name}").ModelArgs
    taken = {each.name for each in dataclasses.fields(arguments)}
    config = {key: value for key, value in configuration(name).items() if key in taken}
    more["vocab_size"] = VOCAB_SIZE
    if "text_config" in config:
        config["text_config"] |= more
    return make_model(folder, name, dtype=dtype, **config | more)


def answers(
    model: Path, load: str = "", save: str = "", adapters: tuple[str, ...] = (), wrong: tuple[str, ...] = (),
    **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return answers to all prompts in one batch, then each alone from cached pages.

    ``load`` is a saved prompt to load first, and ``save`` a file for the longest prompt. With adapters or
    vision, answers with each adapter or to pictures are returned, too. Loading ``wrong`` adapters, as new
    ones and in place of the first adapter, must fail.
    """
    cores: list[EngineCore] = []
    drafts = Drafts()

    def factory(*args: Any) -> EngineCore:
        cores.append(build_core(*args))
        return cores[0]

    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=1)
    config = EngineConfig(model=str(model), **(SETTINGS | settings))
    with LLM(config, observer=drafts, core_factory=factory) as llm:
        refused = ""
        if load:
            try:
                llm.load_prompt(load)
            except InvalidRequest as error:
                refused = str(error)
        first = llm.generate(PROMPTS, params, progress=False)
        alone = [llm.generate([prompt], params, progress=False)[0] for prompt in PROMPTS]

        def said(output: Any) -> tuple[list[int], list[float]]:
            sample = output.outputs[0]
            return list(sample.token_ids), [each.logprob for each in sample.logprobs]

        several = SamplingParams(max_tokens=8, temperature=0.9, seed=3, n=3, prompt_logprobs=1)
        guided = SamplingParams(
            max_tokens=8, temperature=0.0, structured=StructuredOutput(regex="[a-f]{4,6}[0-9]")
        )
        more = llm.generate([PROMPTS[1], PROMPTS[2]], several, progress=False)
        more += llm.generate(PROMPTS[:2], guided, progress=False)
        for folder in adapters:
            llm.load_adapter(folder, folder)
        failures = [
            failure(lambda: llm.load_adapter(name, folder, replace=True))  # noqa: B023
            for folder in wrong
            for name in (folder, adapters[0])
        ]
        work = [(prompt, name) for prompt in PROMPTS[:3] for name in adapters]
        adapted = llm.generate(
            [prompt for prompt, _ in work], params, adapter=[name for _, name in work], progress=False
        )
        asked = pictures() if settings.get("vision") else []
        seen = llm.generate(asked, params, progress=False)
        if save:
            llm.save_prompt(PROMPTS[3], save)
        gauges = cores[0]._gauge_source.measure()
        memories = [llm.info.memory, *llm.info.other_ranks]
        return {
            "tokens": [said(output)[0] for output in first],
            "bits": [list(said(output)) for output in first],
            "more": [[*(each.text for each in out.outputs), str(out.prompt_logprobs)] for out in more],
            "guided": [out.outputs[0].text for out in more[2:]],
            "accepted": drafts.num_accepted,
            "rejected": drafts.num_rejected,
            "kv_format": llm.info.kv_format,
            "same_alone": [said(output) for output in first] == [said(output) for output in alone],
            "cached": [output.cached_tokens for output in alone],
            "found": [output.cached_tokens for output in first],
            "dropped": dict(gauges.store.dropped) if gauges.store else {},
            "preempted": cores[0]._scheduler.num_preemptions,
            "swapped": gauges.swap.num_in if gauges.swap else 0,
            "refused": refused,
            "adapted": [said(output)[0] for output in adapted],
            "failures": failures,
            "seen": [said(output)[0] for output in seen],
            "page_bytes": [memory.pages for memory in memories],
            "weight_bytes": [memory.weights for memory in memories],
            "state_bytes": [memory.states for memory in memories],
        }


def failure(call: Callable[[], object]) -> str:
    try:
        call()
    except InvalidRequest as error:
        return str(error)
    return ""


def pictures() -> list[Any]:
    import tiny_vlm

    return [
        tiny_vlm.Asked(("w", tiny_vlm.picture(seed, 192, 128), "is this")).messages for seed in (1, 2)
    ] + [tiny_vlm.Asked(("hello world",)).messages]


def in_ranks(model: Path, *launcher: str, **settings: Any) -> dict[str, Any]:
    command = [*launcher, sys.executable, __file__, str(model), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as monkeypatch:
        compute_every_draft(monkeypatch)
        print(json.dumps(answers(Path(sys.argv[1]), **json.loads(sys.argv[2]))))
