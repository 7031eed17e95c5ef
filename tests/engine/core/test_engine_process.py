from __future__ import annotations

import asyncio
import os
import signal

import pytest

from engines import collect, until
from fakes import Recording
from octavo.engine import AsyncEngine, EngineConfig, EngineDead, SamplingParams, StructuredOutput
from octavo.engine.api.errors import InvalidRequest, NotFound
from octavo.engine.core import commands
from octavo.engine.core.engine_process import EngineProcess
from octavo.engine.frontend.llm import LLM

CONFIG = EngineConfig(model="demo", num_pages=64, max_running=4)
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = ("3 + 4 =", "twelve minus two", "The capital of")


async def test_process_and_thread_serve_equal_outputs() -> None:
    with LLM(CONFIG) as llm:
        wanted = [output.outputs[0].text for output in llm.generate(list(PROMPTS), GREEDY, progress=False)]
    observer = Recording()
    engine = AsyncEngine(CONFIG, observer=observer, own_process=True)
    await engine.start()
    try:
        assert isinstance(engine._client, EngineProcess)
        found = await asyncio.gather(*(collect(engine.generate(prompt, GREEDY)) for prompt in PROMPTS))
        assert [samples[0].text for samples in found] == wanted
        assert sum(record.generated_tokens for record in observer.records) == 12 * len(PROMPTS)
        await until(lambda: engine.gauges().num_running == 0)
        structured = SamplingParams(max_tokens=8, structured=StructuredOutput(regex="(ab){2}"))
        assert (await collect(engine.generate("x", structured)))[0].text == "abab"
        with pytest.raises(InvalidRequest, match="regex"):
            await collect(engine.generate("x", SamplingParams(structured=StructuredOutput(regex="("))))
        assert (await engine.run_command(commands.get_cache_stats())).pins == {}
        with pytest.raises(NotFound):
            await engine.run_command(commands.explain_request("nobody"))
        stream = engine.generate("count", SamplingParams(max_tokens=400, ignore_eos=True))
        await anext(stream)
        await stream.aclose()
        await until(lambda: engine.gauges().num_running == 0)
    finally:
        await engine.stop()
    process = engine._client._process
    assert process is not None
    assert process.returncode == 0


async def test_a_process_that_is_killed_fails_its_streams() -> None:
    engine = AsyncEngine(CONFIG, own_process=True)
    await engine.start()
    assert isinstance(engine._client, EngineProcess)
    stream = engine.generate("count", SamplingParams(max_tokens=400, ignore_eos=True))
    await anext(stream)
    process = engine._client._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineDead):
        async for _ in stream:
            pass
    with pytest.raises(EngineDead):
        await collect(engine.generate("again", GREEDY))
    await engine.stop()
