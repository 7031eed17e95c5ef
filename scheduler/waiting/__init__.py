from .cached_lengths import cached_tokens
from .line import HARD_MAX_OVERTAKEN
from .queue import DEFAULT_QUANTUM, LOOK_AHEAD, PROMPT_COST, WaitingQueue

__all__ = [
    "DEFAULT_QUANTUM",
    "HARD_MAX_OVERTAKEN",
    "LOOK_AHEAD",
    "PROMPT_COST",
    "WaitingQueue",
    "cached_tokens",
]
