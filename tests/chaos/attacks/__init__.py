from __future__ import annotations

from ..attack import ATTACKS
from . import connections, generation, grammars, http, load, messages, other_calls

MODULES = (grammars, generation, messages, other_calls, connections, http, load)
BY_CLIENTS = tuple(
    attack
    for module in MODULES
    for attack in ATTACKS.values()
    if attack.run.__module__ == module.__name__ and module is not load
)

__all__ = ("ATTACKS", "BY_CLIENTS")
