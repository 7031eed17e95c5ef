"""Background load that takes as much CPU time as attackers, for the run without attacks."""

from __future__ import annotations

import time

from ..attack import Attack, Seen, Target


async def burn(target: Target, seen: Seen) -> None:
    end = time.monotonic() + target.seconds
    while time.monotonic() < end:
        seen["rounds"] += 1


ATTACK = Attack(name="idle-cpu", finding="-", run=burn)
