"""The demo model in a pool that is too small.

Preempted sequences must get the tokens and log probabilities that they get in a large pool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.engine import LLM, SamplingParams
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.stats import Gauges
from octavo.engine.core.build import build_core
from octavo.engine.core.engine_core import EngineCore
from swapping import wait_for_disk

pytestmark = pytest.mark.parity

ROOMY, SHORT = 96, 12  # pages
Outputs = list[tuple[list[int], list[float]]]


def generate(kv_format: str, num_pages: int, **options: object) -> tuple[Outputs, int, Gauges]:
    cores: list[EngineCore] = []

    def remember(config: EngineConfig, observer: object = None) -> EngineCore:
        cores.append(build_core(config, observer))  # type: ignore[arg-type]
        return cores[0]

    config = EngineConfig(
        kv_format=kv_format, num_pages=num_pages, max_running=5, target_itl="off", **options  # type: ignore[arg-type]
    )  # fmt: skip
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 200, 40).tolist() for _ in range(5)]
    with LLM(config, core_factory=remember) as llm:
        params = SamplingParams(max_tokens=130, ignore_eos=True, logprobs=1)
        outputs = [request.outputs[0] for request in llm.generate(prompts, params, progress=False)]
    found = [(each.token_ids, [one.logprob for one in each.logprobs or ()]) for each in outputs]
    return found, cores[0]._scheduler.num_preemptions, cores[0]._gauge_source.measure()


@pytest.mark.parametrize("kv_format", ["fp4"])
def test_bits_are_those_of_a_pool_with_space_for_all(
    kv_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_disk(monkeypatch)
    expected, none, _ = generate(kv_format, ROOMY)
    assert none == 0
    assert len(expected[0][1]) == 130
    again, times, _ = generate(kv_format, SHORT)
    assert times > 0
    assert again == expected
    copied, times, gauges = generate(kv_format, SHORT, swap_memory=2**28)
    assert times > 0
    assert gauges.swap is not None
    assert gauges.swap.num_in > 0
    assert copied == expected
    read, times, gauges = generate(kv_format, SHORT, cache_dir=tmp_path)
    assert times > 0
    assert gauges.store is not None
    assert gauges.store.loaded > 0
    assert read == expected
