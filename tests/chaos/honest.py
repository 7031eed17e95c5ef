"""Honest clients: fixed prompts and seeds, compared with answers from a run without attacks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from octavo.engine.api.errors import OctavoError, Overloaded
from octavo.engine.api.outputs import Delta, TokenLogprob
from octavo.engine.api.prompt import Prompt
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.client.client import Client

from .setups import Folder

ANSWER_S = 30.0  # seconds until a whole answer must have arrived
PAUSE_S = 0.1  # seconds between two requests of a client
TICK_S = 0.005

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
DRAWN = SamplingParams(max_tokens=150, temperature=0.9, top_p=0.95, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Request:
    name: str
    tenant: str
    prompt: Prompt
    params: SamplingParams


REQUESTS = (
    Request(
        "text", "alice", "Once upon a time there was a ledger. " * 6, replace(DRAWN, seed=11, logprobs=3)
    ),
    Request(
        "ids", "bob", [at * 7 % 1400 + 3 for at in range(200)], replace(DRAWN, temperature=0.0, logprobs=0)
    ),
    Request(
        "chat",
        "alice",
        [{"role": "user", "content": "Who ate the last of the plums?"}],
        replace(DRAWN, seed=12, logprobs=1),
    ),
    Request(
        "schema",
        "bob",
        "A person: ",
        replace(
            DRAWN, seed=13, logprobs=1, ignore_eos=False, structured=StructuredOutput(json_schema=SCHEMA)
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str


@dataclass(slots=True)
class Experience:
    """Times that honest clients measured, in seconds."""

    answers: int = 0
    refusals: int = 0  # RESOURCE_EXHAUSTED, then retried
    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds until each first token
    late: list[float] = field(default_factory=list)  # seconds of delay in this process itself
    wrong: list[str] = field(default_factory=list)


def quantile(times: list[float], share: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class HonestLoad:
    def __init__(self, folder: Folder, address: str, expected: dict[str, Answer]) -> None:
        self._folder = folder
        self._address = address
        self.expected = expected
        self.experience = Experience()
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._ask_on(request)) for request in REQUESTS]
        self._tasks.append(asyncio.create_task(self._measure_lateness()))

    async def stop(self) -> Experience:
        self._stopping.set()
        await asyncio.gather(*self._tasks)
        return self.experience

    async def _ask_on(self, request: Request) -> None:
        seen, done = self.experience, 0
        async with self._folder.client(self._address, request.tenant) as client:
            while not self._stopping.is_set() or not done:
                try:
                    answer = await asyncio.wait_for(self._ask(client, request), ANSWER_S)
                except Overloaded:
                    seen.refusals += 1
                    await asyncio.sleep(PAUSE_S)
                    continue
                except (OctavoError, TimeoutError) as error:
                    seen.wrong.append(f"{request.name}: {_said(error)}")
                    return
                seen.answers += 1
                done += 1
                expected = self.expected.setdefault(request.name, answer)
                if answer != expected:
                    seen.wrong.append(f"{request.name}: {_difference(answer, expected)}")
                    return
                await asyncio.sleep(PAUSE_S)

    async def _ask(self, client: Client, request: Request) -> Answer:
        began = time.monotonic()
        last: float | None = None
        deltas: list[Delta] = []
        stream: AsyncGenerator[Delta, None] = client.generate(request.prompt, request.params)
        async with aclosing(stream):
            async for delta in stream:
                now = time.monotonic()
                if last is None:
                    self.experience.first.append(now - began)
                else:
                    self.experience.gaps.append(now - last)
                last = now
                deltas.append(delta)
        return Answer(
            tuple(token for delta in deltas for token in delta.token_ids),
            "".join(delta.text for delta in deltas),
            tuple(entry for delta in deltas for entry in delta.logprobs),
            str(deltas[-1].finish_reason) if deltas else "nothing was said",
        )

    async def _measure_lateness(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            await asyncio.sleep(TICK_S)
            self.experience.late.append(time.monotonic() - began - TICK_S)


def _said(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"not answered within {ANSWER_S:.0f} s"
    return f"{type(error).__name__}: {str(error)[:160]}"


def _difference(answer: Answer, expected: Answer) -> str:
    if answer.token_ids != expected.token_ids:
        pairs = enumerate(zip(answer.token_ids, expected.token_ids, strict=False))
        at = next((index for index, (mine, theirs) in pairs if mine != theirs), None)
        where = f"from token {at}" if at is not None else f"in length, {len(answer.token_ids)}"
        return f"other tokens than in the quiet run, {where} (finished by {answer.finish_reason})"
    if answer.logprobs != expected.logprobs:
        return "the tokens of the quiet run with other log probabilities"
    return f"other text or end than in the quiet run: {answer.finish_reason}"
