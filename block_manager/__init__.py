"""Block manager: gives each sequence its pages; see README.md."""

from .digests import sha256_chain
from .events import EventLog, EventsLost, PageEvent
from .manager import BlockManager
from .miss_reasons import Miss
from .page_index import PageContents
from .pins import Pins
from .spec import FullAttention, KVGroupSpec, RecurrentState, ResidualWindow, SlidingWindow
from .types import (
    NULL_PAGE,
    Digest,
    GroupPageTable,
    MediaSpan,
    PageCopy,
    PageCounts,
    PageId,
    PageTable,
    TableState,
)

__all__ = [
    "NULL_PAGE",
    "BlockManager",
    "Digest",
    "EventLog",
    "EventsLost",
    "FullAttention",
    "GroupPageTable",
    "KVGroupSpec",
    "MediaSpan",
    "Miss",
    "PageContents",
    "PageCopy",
    "PageCounts",
    "PageEvent",
    "PageId",
    "PageTable",
    "Pins",
    "RecurrentState",
    "ResidualWindow",
    "SlidingWindow",
    "TableState",
    "sha256_chain",
]
