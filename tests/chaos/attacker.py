"""``python -m chaos.attacker NAME TARGET``: run one attack; the last line counts how calls ended."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter

from chaos.attack import Target
from chaos.attacks import ATTACKS

NICENESS = 15  # so that an attacker's work does not slow the server


def main(name: str, target: Target) -> None:
    os.nice(NICENESS)
    seen: Counter[str] = Counter()
    asyncio.run(ATTACKS[name].run(target, seen))
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Target.from_json(sys.argv[2]))
