from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.engine import LLM, EngineConfig, SamplingParams
from octavo.engine.api.outputs import RequestOutput

pytestmark = pytest.mark.parity

CONFIG = EngineConfig(num_pages=64, page_size=16, max_running=4, max_step_tokens=128)
PROMPT = [number * 7 % 200 for number in range(300)]


def generate(config: EngineConfig) -> RequestOutput:
    with LLM(config) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=8, ignore_eos=True), progress=False)
    return output


def test_a_restarted_engine_continues_from_disk(tmp_path: Path) -> None:
    config = replace(CONFIG, kv_format="fp4", cache_dir=tmp_path)
    cold, warm = generate(config), generate(config)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 288)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    other = generate(replace(config, kv_format="bf16"))
    assert other.cached_tokens == 0, "pages of another format are not this engine's"
    reference = generate(replace(config, backend="reference"))
    assert reference.cached_tokens == 288, "pages of one backend serve another"
