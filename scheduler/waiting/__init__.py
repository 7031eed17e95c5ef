"""Queues of waiting sequences, one policy a file: they say which is admitted next."""

from .age_order import MAX_PASSED
from .base import WaitingQueue
from .cached_lengths import cached_tokens
from .deficits import DeficitQueue
from .fair import Costs, FairQueue
from .first_come import LOOK_AHEAD, FirstComeQueue

__all__ = [
    "LOOK_AHEAD",
    "MAX_PASSED",
    "Costs",
    "DeficitQueue",
    "FairQueue",
    "FirstComeQueue",
    "WaitingQueue",
    "cached_tokens",
]
