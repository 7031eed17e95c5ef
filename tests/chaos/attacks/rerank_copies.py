"""Reranking of a thousand documents with a query or template of a megabyte."""

from __future__ import annotations

import asyncio
import time

from octavo.proto import generation_pb2 as pb

from ..attack import Attack, Seen, Target, count

LONG, MANY, AT_ONCE = 900 << 10, 1000, 4


async def attack(target: Target, seen: Seen) -> None:
    requests = (
        pb.RerankRequest(query="q" * LONG, documents=["d"] * MANY),
        pb.RerankRequest(query="q", documents=["d"] * MANY, template="{query}{document}" + "t" * LONG),
        pb.RerankRequest(query="q", documents=["d"] * MANY, yes="y" * LONG),
        pb.RerankRequest(query="q", documents=["d" * (LONG // MANY)] * MANY, yes="a", no="b"),
    )
    end = time.monotonic() + target.seconds
    async with target.generation() as stub:
        while time.monotonic() < end:
            calls = [stub.Rerank(requests[0], metadata=target.metadata, timeout=20) for _ in range(AT_ONCE)]
            calls += [stub.Rerank(each, metadata=target.metadata, timeout=20) for each in requests[1:]]
            await asyncio.gather(*(count(seen, call) for call in calls))


ATTACK = Attack(name="rerank-copies", finding="y01", run=attack)
