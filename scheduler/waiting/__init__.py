from .age_order import MAX_PASSED, cached_tokens
from .fair import PROMPT_COST, DeficitQueue, FairQueue
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
