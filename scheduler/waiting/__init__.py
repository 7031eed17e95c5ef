"""The queue of waiting sequences and its orders: first come or longest prefix, and two that are fair."""

from .age_order import MAX_PASSED
from .cached_lengths import cached_tokens
from .deficits import DeficitQueue
from .fair import PROMPT_COST, FairQueue
from .queue import LOOK_AHEAD, WaitingQueue

__all__ = [
    "LOOK_AHEAD",
    "MAX_PASSED",
    "PROMPT_COST",
    "DeficitQueue",
    "FairQueue",
    "WaitingQueue",
    "cached_tokens",
]
