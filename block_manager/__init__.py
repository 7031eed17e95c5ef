"""Which page holds which position of which sequence. Standard library only; see README.md."""

from .digests import Hasher, sha256_chain
from .events import EventLog, EventsLost, PageContents, PageEvent
from .manager import BlockManager
from .misses import Miss
from .pins import Pins
from .types import (
    Digest,
    Fork,
    PageCopy,
    PageCounts,
    PageGroup,
    PageId,
    PageTable,
)

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
