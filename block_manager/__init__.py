"""Which page holds which position of which sequence. Standard library only; see README.md."""

from octavo.block_manager.digests import Hasher, sha256_chain
from octavo.block_manager.events import EventLog, EventsLost, PageContents, PageEvent
from octavo.block_manager.manager import BlockManager
from octavo.block_manager.misses import Miss
from octavo.block_manager.pins import Pins
from octavo.block_manager.types import Digest, Fork, PageCopy, PageCounts, PageGroup, PageId, PageTable

__all__ = [
    "BlockManager",
    "Digest",
    "EventLog",
    "EventsLost",
    "Fork",
    "Hasher",
    "Miss",
    "PageContents",
    "PageCopy",
    "PageCounts",
    "PageEvent",
    "PageGroup",
    "PageId",
    "PageTable",
    "Pins",
    "sha256_chain",
]
