"""`make demo`: serve the embedded model and watch several prompts stream at once over gRPC.

The demo asks nine short questions with one system prompt and a question about a long text. It checks the
answers and prints a summary. The exit code is 0 if all answers are right, else 1.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import octavo.engine
from octavo.engine import SamplingParams
from octavo.engine.api.outputs import FinishReason
from octavo.engine.client.client import Client
from octavo.engine.client.server_process import ServerProcess
from octavo.kernels.formats import format_pair, page_format
from octavo_lab.bench.ledgers.documents import make_ledger
from octavo_lab.bench.ledgers.kinds import Codes, Residents

SERVE = ("--model", "demo", "--kv-format", "fp5/fp4", "--page-size", "32", "--num-pages", "128")
START_TIMEOUT, STOP_TIMEOUT, REQUEST_TIMEOUT = 120.0, 30.0, 120.0
CHUNK = 24  # characters of a stream per line of output


class DemoFailed(Exception): ...


@dataclass(slots=True)
class Ask:
    """A prompt and its result. ``truth`` is None if any text is right (stories)."""

    label: str
    system: str
    user: str
    truth: str | None
    question: str
    text: str = ""
    num_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float = 0.0
    finish_reason: FinishReason | None = None

    @property
    def is_right(self) -> bool:
        if self.finish_reason is not FinishReason.STOP:
            return False
        return bool(self.text) if self.truth is None else self.text == self.truth


@dataclass(slots=True)
class Usage:
    peak_held: int = 0
    peak_running: int = 0


def make_prompts() -> list[Ask]:
    codes = make_ledger(Random("demo"), 660, share=0.64, kind=Codes)
    asks: list[Ask] = []
    for turn in dict.fromkeys(codes.turns):
        if len(asks) < 6:
            asks.append(Ask(f"code {len(asks) + 1}", codes.body, turn.question, turn.answer, turn.question))
    for label, question in (
        ("story 1", "Tell me a story about Mara and a lamp."),
        ("story 2", "Write a short story about Hugo."),
        ("story 3", "Tell me a story about Vera and a compass."),
    ):
        asks.append(Ask(label, codes.body, question, None, question))
    people = make_ledger(Random("demo-long"), 1700, share=0.88, absent_rate=0.0, kind=Residents)
    turn = people.turns[0]
    asks.append(Ask("long", "", f"{people.body}\n\n{turn.question}", turn.answer, turn.question))
    return asks


class View:
    """Prints a line per piece of text, with the time and the label."""

    def __init__(self, asks: list[Ask]) -> None:
        self.begin = time.perf_counter()
        self.pending = {ask.label: "" for ask in asks}
        self.width = max(map(len, self.pending))
        for ask in asks:
            print(f"  {'':7} {ask.label:{self.width}} ? {ask.question}")

    def update(self, label: str, text: str) -> None:
        if len(self.pending[label]) >= CHUNK and text.startswith(" "):
            self._flush(label, "|")
        self.pending[label] += text

    def end(self, label: str, ok: bool) -> None:
        if self.pending[label]:
            self._flush(label, "|")
        self.pending[label] = "(right)" if ok else "(WRONG)"
        self._flush(label, "=")

    def _flush(self, label: str, mark: str) -> None:
        seconds = time.perf_counter() - self.begin
        print(f"  {seconds:6.3f}s {label:{self.width}} {mark} {self.pending[label].strip()}", flush=True)
        self.pending[label] = ""


async def stream(client: Client, ask: Ask, view: View, first_token: asyncio.Event | None = None) -> None:
    system = [{"role": "system", "content": ask.system}] if ask.system else []
    messages = [*system, {"role": "user", "content": ask.user}]
    begin = time.perf_counter()
    params = SamplingParams(max_tokens=160)
    async for delta in client.generate(messages, params, timeout=REQUEST_TIMEOUT):
        if not ask.num_tokens:
            ask.ttft_s = time.perf_counter() - begin
            if first_token is not None:
                first_token.set()
        ask.num_tokens += len(delta.token_ids)
        ask.text += delta.text
        ask.prompt_tokens, ask.cached_tokens = delta.prompt_tokens, delta.cached_tokens
        ask.finish_reason = delta.finish_reason
        view.update(ask.label, delta.text)
    view.end(ask.label, ask.is_right)


async def watch(client: Client, usage: Usage) -> None:
    while True:
        info = await client.server_info()
        usage.peak_held = max(usage.peak_held, info.pages.held)
        usage.peak_running = max(usage.peak_running, info.num_running)
        await asyncio.sleep(0.01)


async def run(client: Client, asks: list[Ask], view: View) -> Usage:
    usage = Usage()
    watcher = asyncio.create_task(watch(client, usage))
    try:
        async with asyncio.TaskGroup() as group:
            first_token = asyncio.Event()
            group.create_task(stream(client, asks[0], view, first_token))
            await asyncio.wait_for(first_token.wait(), REQUEST_TIMEOUT)
            for ask in asks[1:]:
                group.create_task(stream(client, ask, view))
    finally:
        watcher.cancel()
    return usage


def summary(asks: list[Ask], usage: Usage, seconds: float, model: Any) -> Iterator[str]:
    checked = [ask for ask in asks if ask.truth is not None]
    right = sum(ask.is_right for ask in checked)
    yield f"answers       {right} of {len(checked)} right, compared with the ledgers to the letter"
    tokens = sum(ask.num_tokens for ask in asks)
    yield (
        f"speed         {tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s"
        f", up to {usage.peak_running} prompts at once, backend {model.backend}"
    )
    *shared, long = asks
    median = statistics.median(ask.ttft_s for ask in shared)
    yield (
        f"first token   {median * 1000:.0f} ms (median of the short prompts), {long.ttft_s * 1000:.0f} ms"
        f" for the long one of {long.prompt_tokens:,} tokens"
    )
    prompt, cached = sum(ask.prompt_tokens for ask in asks), sum(ask.cached_tokens for ask in asks)
    yield f"prefix cache  {cached:,} of {prompt:,} prompt tokens found: the system prompt was computed once"
    size = model.page_size
    yield f"pages         {usage.peak_held} of {model.num_pages} in use at most, {size} positions each"
    positions = model.num_pages * size
    wide, packed = (positions * bytes_per_position(name) for name in ("bf16", model.kv_format))
    used = model.memory.pages_bytes
    yield (
        f"KV memory     {used / 2**20:.2f} MiB for {positions:,} positions; bf16 pages would take"
        f" {wide / 2**20:.2f} MiB, {wide / used:.2f} times as much"
    )
    yield (
        f"              of it {packed / 2**20:.2f} MiB are {model.kv_format} pages, and"
        f" {(used - packed) / 2**20:.2f} MiB keep the latest two pages of each sequence in 16 bits"
    )


def bytes_per_position(kv_format: str) -> int:
    """Return the embedded model's K/V bytes per position: layers x heads x (K row + V row)."""
    folder = Path(octavo.engine.__file__).parent / "demo"
    config = json.loads((folder / "config.json").read_text())
    pair, dim = format_pair(kv_format), config["head_dim"]
    row = sum(page_format(name).row_bytes(dim) for name in (pair.k, pair.v))
    return int(config["num_hidden_layers"] * config["num_key_value_heads"] * row)


async def demo() -> bool:
    server = ServerProcess(SERVE, stop_timeout=STOP_TIMEOUT)
    print(f"$ octavo serve {' '.join(SERVE)}", flush=True)
    try:
        await asyncio.wait_for(server.start(), START_TIMEOUT)
    except TimeoutError:
        raise DemoFailed("the server was not ready in time") from None
    try:
        print(f"  octavo ready: {' '.join(f'{name}={value}' for name, value in server.ready.items())}")
        async with Client(server.ready["grpc"]) as client:
            is_right = await ask_all(client)
    finally:
        code = await server.stop()
    if code != 0:
        raise DemoFailed(f"the server ended with exit code {code} instead of 0")
    return is_right


async def ask_all(client: Client) -> bool:
    asks = make_prompts()
    print(f"\n{len(asks)} prompts over gRPC, one of them long; {len(asks) - 1} share a system prompt:")
    model, view = await client.model_info(), View(asks)
    begin = time.perf_counter()
    usage = await run(client, asks, view)
    seconds = time.perf_counter() - begin
    idle = await client.server_info()
    print("\n" + "\n".join(summary(asks, usage, seconds, model)))
    if idle.pages.held:
        raise DemoFailed(f"{idle.pages.held} pages are still held after the last answer")
    wrong = [ask for ask in asks if not ask.is_right]
    for ask in wrong:
        print(
            f"WRONG {ask.label}: {ask.text!r} ({ask.finish_reason}), expected {ask.truth!r}", file=sys.stderr
        )
    return not wrong


def main() -> int:
    try:
        return 0 if asyncio.run(demo()) else 1
    except (DemoFailed, octavo.engine.OctavoError, TimeoutError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
    except ExceptionGroup as group:
        print(f"demo failed: {group.exceptions[0]}", file=sys.stderr)
    except KeyboardInterrupt:
        print("demo stopped", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
