"""Clients stream from a recurrent model with a small pool and disconnect at random."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time

from ..attack import Attack, Seen, Target

CALLERS = 12


async def attack(target: Target, seen: Seen) -> None:
    end = time.monotonic() + target.seconds
    host, _, port = target.http.rpartition(":")

    async def loop(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < end:
            body = json.dumps(
                {
                    "prompt": f"story {rng.randrange(5)} " * rng.randrange(5, 60),
                    "max_tokens": rng.randrange(20, 300),
                    "n": rng.choice((1, 1, 2)),
                    "ignore_eos": True,
                    "stream": True,
                }
            ).encode()
            head = (
                "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                f"authorization: Bearer {target.token}\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port), limit=2**24)
                writer.write(head.encode() + body)
                with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
                    await asyncio.wait_for(reader.readuntil(b"[DONE]"), rng.random() * 2)
                    seen["whole"] += 1
                writer.transport.abort()
                seen["streams"] += 1

    await asyncio.gather(*(loop(seed) for seed in range(CALLERS)))


ATTACK = Attack(name="http-states", finding="H3", run=attack, setup="recurrent")
