from __future__ import annotations

import asyncio
import time

from ..attack import Attack, Seen, Target

SCRAPERS = 15  # on each port


async def attack(target: Target, seen: Seen) -> None:
    end = time.monotonic() + target.seconds

    async def loop(address: str) -> None:
        host, _, port = address.rpartition(":")
        token = f"authorization: Bearer {target.token}\r\n"
        head = f"GET /metrics HTTP/1.1\r\nhost: x\r\n{token}connection: close\r\n\r\n"
        while time.monotonic() < end:
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(head.encode())
                answer = await reader.read()
                writer.close()
            except OSError:
                seen["not answered"] += 1
                continue
            seen[answer[9:12].decode()] += 1

    await asyncio.gather(*(loop(address) for address in [target.metrics, target.http] * SCRAPERS))


ATTACK = Attack(name="scrapers", finding="metrics", run=attack)
