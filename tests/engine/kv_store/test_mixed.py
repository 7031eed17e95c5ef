from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.engine import LLM, EngineConfig, SamplingParams
from octavo.engine.api.outputs import RequestOutput

pytestmark = pytest.mark.parity

CONFIG = EngineConfig(num_pages=64, page_size=16, max_running=4, max_step_tokens=128, kv_format="fp4")
PROMPT = [number * 7 % 200 for number in range(300)]


def generate(config: EngineConfig) -> RequestOutput:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(config) as llm:
        (output,) = llm.generate([PROMPT], params, progress=False)
    return output


def test_a_restarted_engine_continues_from_both_kinds_of_pages(tmp_path: Path) -> None:
    for name, number in (
        ("residual_pages", 1), ("sink_pages", 2), ("quantize_after", 400), ("quantize_after", 200),
    ):  # fmt: skip
        config = replace(CONFIG, cache_dir=tmp_path, **{name: number})  # type: ignore[arg-type]
        cold, warm = generate(config), generate(config)
        assert (cold.cached_tokens, warm.cached_tokens) == (0, 288), "nobody else's pages will do"
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
