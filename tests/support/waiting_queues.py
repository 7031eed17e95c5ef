from __future__ import annotations

from collections.abc import Callable

from octavo.block_manager import BlockManager
from octavo.scheduler.waiting import WaitingQueue

QUEUES: dict[str, Callable[[BlockManager], WaitingQueue]] = {
    "fcfs": lambda _blocks: WaitingQueue(),
    "vtc": lambda _blocks: WaitingQueue(weights={}),
    "dlpm": lambda blocks: WaitingQueue(blocks, {}, quantum=24.0),
    "lpm": WaitingQueue,
}
