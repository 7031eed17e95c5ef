from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import tiny_adapters
import tiny_models
from native import require_extension
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.stats import StepRecord
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.frontend.llm import LLM

pytestmark = pytest.mark.parity

NAMES = (None, "one", "two")
PROMPTS = [[(7 * i + 3 * j + 11) % 300 for j in range(n)] for i, n in enumerate((40, 23, 70))]
WORK = [(prompt, name) for prompt in PROMPTS for name in NAMES]
PLAIN = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
DIGITS = StructuredOutput(regex="[0-9]{20}")
TIGHT = {"num_pages": 17, "prefix_cache": False}  # each request needs three to six pages


@dataclass(frozen=True)
class Way:
    settings: dict[str, Any]
    params: SamplingParams = PLAIN
    reached: str = ""


FP4 = {"kv_format": "fp4", "residual_pages": 0}

WAYS = {
    "preempted": Way(TIGHT, reached="preemptions"),
    "quantized and preempted": Way(TIGHT | FP4, reached="preemptions"),
    "swapped": Way(TIGHT | {"prefix_cache": True, "swap_memory": 1 << 26}, reached="preemptions"),
    "drafts": Way({"speculate": "draft:"}, reached="accepted"),
    "structured": Way({}, replace(PLAIN, structured=DIGITS)),
    "structured drafts": Way({"speculate": "ngram"}, replace(PLAIN, structured=DIGITS), "drafts"),
    "embedded": Way({}, SamplingParams(max_tokens=1, pooling="last")),
    "embedded means": Way({"max_step_tokens": 32}, SamplingParams(max_tokens=1, pooling="mean")),
    "from disk": Way({"cache_dir": Path()}, reached="cached"),
}


ALONE: dict[tuple[str, ...], list[Any]] = {}
"""Outputs of ``WORK`` served alone, by model, page format and parameters."""


class Seen:
    def __init__(self) -> None:
        self.preemptions = self.cached = self.drafts = self.accepted = 0

    def step(self, record: StepRecord) -> None:
        self.preemptions += record.preemptions
        self.cached += record.hit_tokens
        self.drafts += sum(each.num_drafts for each in record.drafts)
        self.accepted += sum(each.num_accepted for each in record.drafts)

    def rejected(self, reason: str) -> None:
        raise AssertionError(reason)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    require_extension()
    root, name = tmp_path_factory.mktemp("composition"), request.param
    changes: dict[str, Any] = {"text_config": tiny_adapters.HYBRID} if name == "qwen3_5" else {}
    model = tiny_models.make_model(root / "model", name, dtype=mx.float32, **changes)
    keys = tiny_adapters.MIXER if name == "qwen3_5" else tiny_adapters.DENSE
    for seed, adapter in enumerate(NAMES[1:], 1):
        tiny_adapters.make_adapter(root / str(adapter), model, rank=4 * seed, keys=keys, seed=seed)
    modules = tuple(f"{adapter}={root / str(adapter)}" for adapter in NAMES[1:])
    return {"model": str(model), "page_size": 16, "kv_format": "fp16", "num_pages": 200, "max_running": 8,
            "max_step_tokens": 64, "lora_modules": modules}  # fmt: skip


def served(llm: LLM, work: list[tuple[list[int], str | None]], params: SamplingParams) -> list[Any]:
    prompts, names = [prompt for prompt, _ in work], [name for _, name in work]
    outputs = llm.generate(prompts, params, adapter=names, progress=False)
    assert not any(sample.error for output in outputs for sample in output.outputs)
    return [output.embedding or output.outputs[0].token_ids for output in outputs]


@pytest.mark.usefixtures("every_draft_is_computed")
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.few(9)
def test_requests_with_adapters_equal_requests_served_alone(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    way, seen = WAYS[name], Seen()
    pages = {key: way.settings[key] for key in FP4 if key in way.settings}
    key = settings["model"], str(pages), str(way.params)
    if key not in ALONE:
        with LLM(EngineConfig(**settings | pages | {"prefix_cache": False})) as llm:
            ALONE[key] = [served(llm, [each], way.params)[0] for each in WORK]
    alone = ALONE[key]
    changes = dict(way.settings)
    if changes.get("speculate") == "draft:":
        changes["speculate"] += settings["model"]
    if "cache_dir" in changes:
        changes["cache_dir"] = tmp_path
        with LLM(EngineConfig(**settings | changes)) as llm:
            served(llm, WORK, way.params)
    with LLM(EngineConfig(**settings | changes), observer=seen) as llm:
        assert served(llm, WORK, way.params) == alone
    assert not way.reached or getattr(seen, way.reached) > 0, f"no {way.reached}"
    assert len({tuple(each) for each in alone}) > len(PROMPTS), "adapters change something"
