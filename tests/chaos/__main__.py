"""``python -m chaos [--only NAME ...]``: attack real servers and report.

Prints a table and one line of JSON; exit status 1 on any violation."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from behind_nginx import NGINX

from .attack import Attack
from .attacks import ATTACKS, BY_CLIENTS
from .disks import PHASES
from .run import Chaos, run_attackers
from .setups import BEHIND_NGINX, Folder, Server, started
from .verdict import HEADER, Bounds, Phase

SECONDS = 3.0
TOGETHER = (
    "slow-grammars", "giant-texts", "slow-readers", "watchers", "cancelled-requests", "queue-flood",
    "many-fields",
)  # fmt: skip
WITH_SIGTERM = (
    "slow-grammars", "ambiguous-grammars", "slow-readers", "watchers", "giant-texts", "idle-calls",
)  # fmt: skip
LAST = ("together", "sigterm")


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    names = [*ATTACKS, *LAST, *PHASES]
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", help=f"some of {', '.join(names)}"
    )
    parser.add_argument(
        "--slack",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="multiply the bounds of times and memory, on a machine that others use (1)",
    )
    parser.add_argument(
        "--model",
        default="demo",
        metavar="PATH",
        help="serve this model, which has the embedded one's tokenizer (tests/bench/make_model.py) (demo)",
    )
    args = parser.parse_args()
    chosen = args.only or [*(attack.name for attack in BY_CLIENTS), *LAST, *PHASES]
    bounds, began = Bounds().times(args.slack), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="octavo-chaos-") as path:
        chaos = Chaos(Folder.make(Path(path), args.model), bounds)
        print(HEADER, flush=True)
        asyncio.run(_run(chaos, chosen))
    failed = [phase.name for phase in chaos.phases if phase.wrong]
    result = {
        "chaos": "failed" if failed else "held",
        "seconds": round(time.monotonic() - began),
        "bounds": {name: getattr(bounds, name) for name in bounds.__dataclass_fields__},
        "failed": failed,
        "phases": [phase.as_json() for phase in chaos.phases],
    }
    print(f"failed: {', '.join(failed)}" if failed else "everything held")
    print(json.dumps(result))
    return 1 if failed else 0


async def _run(chaos: Chaos, chosen: list[str]) -> None:
    for setup in ("usual", "tiny", "recurrent", "recurrent-disk", BEHIND_NGINX):
        attacks = [ATTACKS[name] for name in chosen if name in ATTACKS and ATTACKS[name].setup == setup]
        last = [name for name in LAST if name in chosen] if setup == "usual" else []
        if setup == BEHIND_NGINX and NGINX is None:
            for each in attacks:
                chaos.add(Phase(each.name, each.finding, skipped="nginx is not installed"))
        elif attacks or last:
            await _attack_in_turn(chaos, setup, attacks, last)
    for name in chosen:
        if name in PHASES:
            await PHASES[name](chaos)


async def _attack_in_turn(chaos: Chaos, setup: str, attacks: list[Attack], last: list[str]) -> None:
    waiting: list[tuple[str, str, tuple[str, ...]]] = [
        (attack.name, attack.finding, (attack.name,)) for attack in attacks
    ]
    if "together" in last:
        waiting.append(("together", "all", TOGETHER))
    while True:
        async with started(Server(setup, chaos.folder)) as server:
            await chaos.quiet(server, setup, seconds=SECONDS / 2)
            held = True
            while waiting and held:
                name, finding, attackers = waiting.pop(0)
                async with chaos.phase(server, setup, name, finding) as phase:
                    phase.may_see = frozenset().union(*(ATTACKS[each].may_see for each in attackers))
                    phase.seen = await run_attackers(attackers, server.target(SECONDS))
                held = not phase.wrong
            if held:
                await _end(chaos, server, attacked="sigterm" in last)
                return


async def _end(chaos: Chaos, server: Server, *, attacked: bool) -> None:
    phase = Phase("sigterm" if attacked else "end", "A2")
    attackers = None
    if attacked:
        attackers = asyncio.create_task(run_attackers(WITH_SIGTERM, server.target(SECONDS)))
        await asyncio.sleep(SECONDS / 2)
    phase.wrong = await server.end()
    if attackers is not None:
        phase.seen = await attackers
    chaos.add(phase)


if __name__ == "__main__":
    sys.exit(main())
