from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

from fakes import FakeCore, Recording, small_config
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.output_collector import OutputCollector
from octavo.engine.api.outputs import Delta
from octavo.engine.api.prompt import EncodedPrompt
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.core.request import Request
from octavo.engine.frontend.input_processor import InputProcessor
from oracle import Expected


def admission_of(core: EngineCore) -> InputProcessor:
    grammars = core.builder.grammars
    engine: Any = SimpleNamespace(
        info=core.info, tokenizer=core.tokenizer, capacity=core.capacity, grammars=grammars
    )
    return InputProcessor(engine)


class Harness:
    """A core with its inputs and outputs; invariants are checked after every step.

    The clock advances 1 ms per reading, so that decisions to draft do not depend on the machine."""

    def __init__(self, config: EngineConfig | None = None, **options: object) -> None:
        self.observer = Recording()
        now, ticks = time.monotonic(), itertools.count(1000)
        self.fake = FakeCore(clock=lambda: now + next(ticks) * 1e-3, **options)  # type: ignore[arg-type]
        self.core: EngineCore = self.fake(config or small_config(), self.observer)
        self.admission = admission_of(self.core)
        self.deltas: dict[Request, list[Delta]] = {}

    def add(self, prompt: bytes | list[int], params: SamplingParams, **options: object) -> Request:
        data = self.admission.admit(EncodedPrompt(list(prompt)), params, **options)  # type: ignore[arg-type]
        request = self.core.builder.build(data)
        self.core.add(request)
        self.deltas[request] = []
        return request

    def step(self) -> None:
        for update in self.core.step():
            self.deltas[update.request].append(update.delta)
        self.core._blocks.check()

    def run(self, max_steps: int = 10_000) -> None:
        while self.core.has_work:
            max_steps -= 1
            assert max_steps, "the engine gets nowhere"
            self.step()

    def result(self, request: Request, index: int = 0) -> Expected:
        collector = OutputCollector()
        for delta in self.deltas[request]:
            if delta.index == index:
                collector.add(delta)
        merged = collector.take()
        assert merged.finish_reason is not None
        return Expected(list(merged.token_ids), merged.text, merged.finish_reason, merged.stop_match)

    def assert_idle(self) -> None:
        gauges = self.core.gauges
        assert (gauges.num_running, gauges.num_waiting, gauges.pages_held) == (0, 0, 0)
        assert gauges.states is None or gauges.states.held == 0
        assert not self.core._blocks._copies.pending
        assert not self.core._live.by_sequence
