"""Mixed load on both demo models for an hour.

    python -m chaos.soak [--seconds 3600] [--plot FILE]

Includes swapping, a disk cache, speculation, grammars, batches, pins, watchers and cancellations.
Exit status 1 if a process's memory grows by more than ``GROWTH_MIB`` per hour, if the server still holds
something at the end, if a counter of ``COUNTERS`` is 0, or if a server fails. Prints one line of JSON."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

from octavo.engine.client.client import Client
from octavo.engine.client.server_process import ServerProcess
from octavo.proto import cache_pb2
from octavo.proto import generation_pb2 as pb

from .attack import count, request_of
from .observer import Observer

GROWTH_MIB = 8.0  # MiB per hour after warm-up
WARM_UP = 0.3
TENTH = 10
SAMPLE_S = 1.0
CALLERS = 16
FILLING = 17_000
GRAMMARS = 128  # different grammars, to fill their cache of up to 14 MiB
PERIOD_S = 12.0  # seconds; all clients are active together for a part of each period
COUNTERS = (
    "octavo_generated_tokens_total",
    "octavo_preemptions_total",
    "octavo_spec_accepted_tokens_total",
    "octavo_store_loaded_pages_total",
    'octavo_swapped_pages_total{direction="in"}',
)
REST_S = 30.0  # seconds for everything to be released
FLAGS = ("--num-pages", "96", "--page-size", "16", "--max-running", "16", "--swap-memory", "8MiB",
         "--cache-dir-bytes", "16MiB", "--speculate", "ngram", "--max-pinned-pages", "32",
         "--drain-timeout", "5")  # fmt: skip
MODELS: dict[str, tuple[str, ...]] = {"demo": (), "demo-hybrid": ("--state-memory", "4MiB")}
PROCESSES = ("server", "helper")
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}}'


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of the server and of its largest helper process, without pages of files.

    ``at``: seconds since the start; the helper's memory is 0 without helpers."""

    at: float
    server: int
    helper: int


@dataclass(slots=True)
class Run:
    model: str
    memory: list[Sample] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)

    def minutes(self, process: str) -> list[float]:
        largest: dict[int, int] = {}
        for sample in self.memory:
            minute = int(sample.at // 60)
            largest[minute] = max(getattr(sample, process), largest.get(minute, 0))
        return [round(size / 2**20, 1) for size in largest.values()]

    def growth_mib(self, process: str, seconds: float) -> float:
        late = (sample for sample in self.memory if sample.at >= WARM_UP * seconds)
        sizes: list[int] = [size for sample in late if (size := getattr(sample, process))] or [0]
        part = max(1, len(sizes) // TENTH)
        return (statistics.median(sizes[-part:]) - statistics.median(sizes[:part])) / 2**20


def sample_of(pid: int, at: float) -> Sample:
    sizes: list[int] = []
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError):
                sizes.append(anonymous(each))
    server, *helpers = sizes or [0]
    return Sample(at, server, max(helpers, default=0))


def anonymous(process: psutil.Process) -> int:
    """Return the bytes of a process's memory that no file backs."""
    if sys.platform != "linux":
        return int(process.memory_full_info().uss)
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return 0 if found is None else int(found[1]) * 1024


async def ask(client: Client, rng: random.Random, seen: Counter[str]) -> None:
    words = f"{rng.choice('abcdefgh')} once upon a time " * rng.randint(1, 40)
    stub, cache = client.stub, client.cache.stub
    sampling: dict[str, Any] = {
        "max_tokens": rng.randint(1, 80),
        "n": rng.choice((1, 1, 1, 3)),
        "temperature": rng.choice((0.0, 0.8)),
        "ignore_eos": rng.random() < 0.5,
        "logprobs": rng.choice((None, None, 3)),
        "stop": rng.choice(((), (".",))),
    }
    match rng.randrange(12):
        case 0:
            call = stub.Tokenize(pb.TokenizeRequest(text=words))
        case 1:
            call = stub.Embed(pb.EmbedRequest(text=words))
        case 2:
            number = rng.randrange(10**6)
            structured = (
                pb.Structured(regex=f"({number}|ab|c)+") if number % 2 else pb.Structured(json_schema=SCHEMA)
            )
            call = stub.Generate(request_of(words, structured=structured, max_tokens=40))
        case 3:
            call = stub.Generate(request_of(words, prompt_logprobs=3, max_tokens=2, n=2))
        case 4:
            requests = [request_of(f"{at} {words}", max_tokens=8) for at in range(6)]
            call = stub.GenerateMany(iter(requests))
        case 5:
            call = cache.Watch(cache_pb2.WatchRequest())
            asyncio.get_running_loop().call_later(0.2 + rng.random(), call.cancel)
        case 6:
            name = str(rng.randrange(4))
            prefix = cache_pb2.Prefix(text=words[:200])
            await count(seen, cache.Pin(cache_pb2.PinRequest(name=name, prefix=prefix)))
            call = cache.Unpin(cache_pb2.UnpinRequest(name=name))
        case 7:
            call = cache.GetStats(cache_pb2.GetStatsRequest())
        case _:
            call = stub.Generate(request_of(words, **sampling))
    if rng.random() < 0.25:
        asyncio.get_running_loop().call_later(rng.random() * 0.3, call.cancel)
    await count(seen, call)


async def fill(address: str) -> None:
    async def loop(first: int) -> None:
        async with Client(address) as client:
            for number in range(first, FILLING, CALLERS):
                await client.stub.Generate(request_of(f"{number:06} " * 6, max_tokens=1)).read()
            for number in range(first, GRAMMARS, CALLERS):
                structured = pb.Structured(regex=f"({number}|ab|c)+")
                await count(Counter(), client.stub.Generate(request_of(structured=structured, max_tokens=40)))

    await asyncio.gather(*(loop(first) for first in range(CALLERS)))


async def load(run: Run, address: str, seconds: float, busy: float) -> None:
    began = time.monotonic()
    end = began + seconds

    async def loop(seed: int) -> None:
        rng = random.Random(seed)
        async with Client(address) as client:
            while (now := time.monotonic()) < end:
                if (at := (now - began) % PERIOD_S) < busy * PERIOD_S:
                    await ask(client, rng, run.seen)
                else:
                    await asyncio.sleep(PERIOD_S - at)

    await asyncio.gather(*(loop(seed) for seed in range(CALLERS)))


@contextlib.asynccontextmanager
async def sampled(run: Run, pid: int) -> AsyncIterator[None]:
    began = time.monotonic()

    async def sample() -> None:
        for number in itertools.count(1):
            run.memory.append(await asyncio.to_thread(sample_of, pid, time.monotonic() - began))
            await asyncio.sleep(max(0.0, began + number * SAMPLE_S - time.monotonic()))

    task = asyncio.create_task(sample())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def soak(model: str, folder: Path, seconds: float, busy: float) -> Run:
    run = Run(model)
    flags = ["--model", model, *FLAGS, *MODELS[model], "--cache-dir", str(folder / model)]
    server = ServerProcess(flags, stop_timeout=60)
    await server.start()
    try:
        await fill(server.ready["grpc"])
        async with sampled(run, server.pid):
            await load(run, server.ready["grpc"], seconds, busy)
        async with Client(server.ready["grpc"]) as client:
            for pin in (await client.cache.stats()).pins:
                await client.cache.unpin(pin.name)
        observer = Observer(server.pid, server.ready["metrics"])
        run.wrong += await observer.at_rest(patience=REST_S)
        counted = await observer.counters()
        run.counters = {name: int(counted[name]) for name in COUNTERS}
        run.wrong += [f"{name} is 0: that was not tried" for name, value in run.counters.items() if not value]
    except grpc.aio.AioRpcError as error:
        run.wrong.append(f"the server is gone: {error.details()}")
    finally:
        code = await server.stop()
    if code != 0:
        run.wrong.append(f"it ended with {code}: {' '.join(list(server.last_errors)[-2:])}")
    allowed = GROWTH_MIB * max(1.0, seconds / 3600)
    for process in PROCESSES:
        if (grown := run.growth_mib(process, seconds)) > allowed:
            run.wrong.append(
                f"the {process} grew by {grown:.1f} MiB after warm-up, {allowed:.0f} are allowed"
            )
    own = {status for status in run.seen if status in ("UNKNOWN", "INTERNAL", "UNAVAILABLE", "CANCELLED")}
    if own:
        run.wrong.append(f"calls ended with {', '.join(sorted(own))}")
    if run.seen["OK"] < seconds:
        run.wrong.append(
            f"{run.seen['OK']} calls were served, less than one a second: the load was too small"
        )
    return run


def draw(runs: list[Run], seconds: float, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    for run in runs:
        times = [sample.at / 60 for sample in run.memory]
        line = axes.plot(times, [each.server / 2**20 for each in run.memory], label=run.model)[0]
        helpers = [each.helper / 2**20 or math.nan for each in run.memory]
        axes.plot(times, helpers, ":", color=line.get_color(), label=f"{run.model}, largest helper process")
    axes.axvline(WARM_UP * seconds / 60, color="grey", linestyle=":", label="end of warm-up")
    axes.set(xlabel="minutes", ylabel="anonymous memory, MiB", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, metavar="S", help="of load (3600)")
    parser.add_argument("--plot", type=Path, default=Path("build/soak.png"), metavar="FILE",
                        help="picture of the memory over time (build/soak.png)")  # fmt: skip
    parser.add_argument("--busy", type=float, default=1.0, metavar="PART",
                        help="part of the time that is under load, from 0 to 1 (1)")  # fmt: skip
    args = parser.parse_args()
    if not 0 < args.busy <= 1:
        parser.error(f"--busy must be more than 0 and at most 1, got {args.busy}")
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    os.environ["GRPC_VERBOSITY"] = "NONE"

    async def all_models() -> list[Run]:
        with tempfile.TemporaryDirectory(prefix="octavo-soak-") as folder:
            each = (soak(model, Path(folder), args.seconds, args.busy) for model in MODELS)
            return list(await asyncio.gather(*each))

    runs = asyncio.run(all_models())
    draw(runs, args.seconds, args.plot)
    for run in runs:
        grown = ", ".join(f"{each} {run.growth_mib(each, args.seconds):+.1f} MiB" for each in PROCESSES)
        print(f"{run.model}, after warm-up: {grown}; {dict(run.seen)}")
        for wrong in run.wrong:
            print(f"    {wrong}")
    failed = [run.model for run in runs if run.wrong]
    result = {
        "soak": "failed" if failed else "held",
        "seconds": args.seconds,
        "busy": args.busy,
        "growth_mib": {
            run.model: {each: round(run.growth_mib(each, args.seconds), 1) for each in PROCESSES}
            for run in runs
        },
        "calls": {run.model: dict(run.seen) for run in runs},
        "counters": {run.model: run.counters for run in runs},
        "memory_mib": {run.model: {each: run.minutes(each) for each in PROCESSES} for run in runs},
        "wrong": {run.model: run.wrong for run in runs},
        "plot": str(args.plot),
    }
    print(json.dumps(result))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
