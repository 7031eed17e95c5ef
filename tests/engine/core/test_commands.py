from __future__ import annotations

import dataclasses
import pickle
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import Gate, running, until
from fake_adapters import FakeAdapters
from fakes import FakeCore, small_config
from octavo.block_manager import FullAttention, SlidingWindow
from octavo.engine import LLM, SamplingParams
from octavo.engine.api.errors import EventsGone, NotFound, OctavoError
from octavo.engine.core import commands, engine_thread
from octavo.engine.core.commands import Command, CommandTarget

GROUPS = (FullAttention(num_pages=64), SlidingWindow(num_pages=40, window=10))
PROMPT = list(range(10, 32))


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    config = small_config(save_dir=tmp_path, max_pinned_pages=20)
    with LLM(config, core_factory=FakeCore(groups=GROUPS, adapters=FakeAdapters())) as engine:
        engine._run_command(commands.subscribe_events(tokens=True))
        for _ in range(2):
            engine.generate([PROMPT], SamplingParams(max_tokens=2), progress=False)
        yield engine


def samples(llm: LLM) -> list[Command[Any]]:
    digests = tuple(llm._run_command(commands.list_pages()))
    (full, _) = llm._run_command(commands.read_pages(digests))
    return [
        commands.get_cache_stats("p"),
        commands.list_reused_prefixes(b"", 10),
        commands.explain_request("0"),
        commands.get_request_tokens("0"),
        commands.pin_prefix("p", tuple(PROMPT)),
        commands.unpin_prefix("p", "p"),
        commands.subscribe_events(),
        commands.unsubscribe_events(),
        commands.page_events_since(1, 10),
        commands.get_cached_contents(),
        commands.get_page_layout(),
        commands.find_prefix(digests),
        commands.read_pages(digests[:2], ((0, 1), (1,))),
        commands.insert_pages(tuple(PROMPT[:20]), full.pages, b"other", 0, 0),
        commands.list_pages(),
        commands.count_unwritten_pages(tuple(PROMPT[:20])),
        commands.flush_cache(),
        commands.load_adapter("french", "/srv/french"),
        commands.unload_adapter("french"),
    ]


def is_plain(value: object) -> bool:
    if value is None or isinstance(value, bool | int | float | str | bytes | array | np.ndarray):
        return True
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if dataclasses.is_dataclass(value):
        return all(is_plain(getattr(value, field.name)) for field in dataclasses.fields(value))
    return False


def test_every_command_and_every_answer_is_plain_data_that_can_be_pickled(llm: LLM) -> None:
    asked = samples(llm)
    assert {command.name for command in asked} == commands.COMMANDS.keys(), "add a sample of the new command"
    for command in asked:
        assert is_plain(command), command
        copy = pickle.loads(pickle.dumps(command))
        assert copy.name == command.name
        answer: Any = llm._run_command(copy)
        assert is_plain(answer), f"{command.name} answers {answer}"
        pickle.loads(pickle.dumps(answer))


def test_errors_of_commands_can_be_pickled(llm: LLM) -> None:
    for command, error in (
        (commands.explain_request("nobody"), NotFound),
        (commands.unpin_prefix("p", "p"), NotFound),
        (commands.page_events_since(10_000, 1), EventsGone),
    ):
        with pytest.raises(OctavoError) as caught:
            llm._run_command(command)
        assert type(caught.value) is error
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


async def test_a_flood_of_commands_does_not_hold_up_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "COMMANDS_PER_STEP", 4)
    gate = Gate()
    async with running(gate=gate) as (engine, fake, _):
        stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))
        gate.allow(1)
        await anext(stream)
        assert engine._client is not None
        assert fake.runner is not None
        runner = fake.runner
        await until(lambda: runner.num_steps == 1)
        asked = [engine._client.run_command(commands.get_cache_stats()) for _ in range(40)]
        for steps in range(2, 6):
            before = sum(answer.done() for answer in asked)
            gate.allow(1)
            await until(lambda steps=steps: runner.num_steps == steps)  # type: ignore[misc]
            assert sum(answer.done() for answer in asked) <= before + 2 * 4
        gate.open()
        await until(lambda: all(answer.done() for answer in asked))
        await stream.aclose()


async def test_no_step_is_in_flight_while_a_command_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, seen = Gate(), []
    async with running(small_config(async_steps=True), gate=gate, feeds=True) as (engine, fake, _):
        stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))
        gate.allow(1)
        await anext(stream)
        assert fake.runner is not None
        assert fake.core is not None
        assert engine._client is not None
        runner, core = fake.runner, fake.core

        def executing(_: CommandTarget) -> None:
            seen.append((core._in_flight, len(runner.calls)))

        monkeypatch.setitem(commands.COMMANDS, "get_cache_stats", executing)
        await until(lambda: gate.is_waiting and ("submit", 2) in runner.calls)
        answer = engine._client.run_command(commands.get_cache_stats())
        gate.open()
        await until(answer.done)
        await stream.aclose()
    ((in_flight, num_calls),) = seen
    assert in_flight is None
    assert runner.calls[num_calls - 1][0] == "resolve"
    assert ("submit", 2) in runner.calls[:num_calls], "there was one"
