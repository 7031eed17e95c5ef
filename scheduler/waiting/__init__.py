from .age_order import HARD_MAX_OVERTAKEN, cached_tokens
from .fair import PROMPT_COST, DeficitQueue, FairQueue
from .queue import LOOK_AHEAD, WaitingQueue

__all__ = [
    "HARD_MAX_OVERTAKEN",
    "LOOK_AHEAD",
    "PROMPT_COST",
    "DeficitQueue",
    "FairQueue",
    "WaitingQueue",
    "cached_tokens",
]
