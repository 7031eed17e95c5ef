"""Log probabilities of long prompts, with all alternatives and many samples."""

from __future__ import annotations

import asyncio
import time

from ..attack import Attack, Seen, Target, count, request_of

WORDS = "all of this is scored, word by word. " * 60


async def attack(target: Target, seen: Seen) -> None:
    end = time.monotonic() + target.seconds
    async with target.generation() as stub:
        while time.monotonic() < end:
            calls = [
                stub.Generate(
                    request_of(WORDS, max_tokens=2, prompt_logprobs=20, n=samples),
                    metadata=target.metadata,
                    timeout=20,
                )
                for samples in (1, 8, 32)
            ]
            await asyncio.gather(*(count(seen, call) for call in calls))


ATTACK = Attack(name="prompt-scores", finding="y07", run=attack)
