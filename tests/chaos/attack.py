from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio

from octavo.proto import cache_pb2_grpc, generation_pb2_grpc
from octavo.proto import generation_pb2 as pb

SERVICE = "/octavo.v1.Generation/"
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)

Seen = Counter[str]
"""Number of ended calls by gRPC status name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    address: str
    http: str
    metrics: str
    token: str
    operator_token: str
    seconds: float

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Target:
        return cls(**json.loads(text))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),)

    @property
    def operator_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.operator_token}"),)

    @contextlib.asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        async with grpc.aio.insecure_channel(self.address, options=_OPTIONS) as channel:
            yield channel

    @contextlib.asynccontextmanager
    async def generation(self) -> AsyncIterator[Any]:
        async with self.channel() as channel:
            yield generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]

    @contextlib.asynccontextmanager
    async def cache(self) -> AsyncIterator[Any]:
        async with self.channel() as channel:
            yield cache_pb2_grpc.CacheStub(channel)  # type: ignore[no-untyped-call]


Run: TypeAlias = Callable[[Target, Seen], Coroutine[None, None, None]]
Open: TypeAlias = Callable[[Target], contextlib.AbstractAsyncContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    finding: str
    run: Run
    setup: str
    may_see: frozenset[str]


ATTACKS: dict[str, Attack] = {}


def attack(name: str, finding: str, *, setup: str = "usual", may_see: str = "") -> Callable[[Run], Run]:
    """Add a function to ``ATTACKS``."""

    def add(run: Run) -> Run:
        assert name not in ATTACKS, f"two attacks are called {name}"
        ATTACKS[name] = Attack(name, finding, run, setup, frozenset(may_see.split()))
        return run

    return add


async def repeat(
    target: Target, num_callers: int, call: Callable[..., Awaitable[object]], *opens: Open
) -> None:
    """Let callers repeat ``call`` until the attack ends.

    It gets the caller's own stubs and random numbers, and the seconds left.
    """
    end = time.monotonic() + target.seconds

    async def loop(seed: int) -> None:
        rng = random.Random(seed)
        async with contextlib.AsyncExitStack() as stack:
            stubs = [
                await stack.enter_async_context(open_(target)) for open_ in opens or (Target.generation,)
            ]
            while (left := end - time.monotonic()) > 0:
                await call(*stubs, rng, left)

    await asyncio.gather(*(loop(seed) for seed in range(num_callers)))


def cancel_later(call: Any, seconds: float) -> None:
    asyncio.get_running_loop().call_later(seconds, call.cancel)


async def count_all(seen: Seen, calls: Iterable[Any]) -> None:
    await asyncio.gather(*(count(seen, call) for call in calls))


async def count(seen: Seen, call: Any) -> None:
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        seen[error.code().name] += 1
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
        seen["cancelled by us"] += 1
    else:
        seen["OK"] += 1


def request_of(text: str = "Once upon a time", **sampling: Any) -> pb.GenerateRequest:
    """A small request; keywords are fields of SamplingParams."""
    return pb.GenerateRequest(text=text, sampling=pb.SamplingParams(**sampling))
