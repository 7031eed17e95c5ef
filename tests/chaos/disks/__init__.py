from __future__ import annotations

from collections.abc import Awaitable, Callable

from ..run import Chaos
from . import damaged_shards, full_disk, hung_disk, killed

PHASES: dict[str, Callable[[Chaos], Awaitable[None]]] = {
    "full-disk": full_disk.run,
    "hung-disk": hung_disk.run,
    "damaged-shards": damaged_shards.run,
    "killed": killed.run,
}
