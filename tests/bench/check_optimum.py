"""Recomputes the bound that ``octavo replay --optimum`` prints, without any of its code.

    python tests/bench/check_optimum.py TRACE.jsonl --sizes 1000,3000,10000,30000

First on small random traffic, where every choice of what to evict can be tried: the best of them finds
what the bound says. Then on the trace, by sorting all pages by their next use whenever room is needed.
Also given is what the same rule finds if heads go before tails where both are needed equally late: a
looser rule's figure, which is no bound. Exits 1 where anything differs. Some minutes; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from octavo_lab.cache_sim.optimum import optimal_hits
from octavo_lab.cache_sim.trace import TraceRequest, read_trace
from prefix_caches import best_hits, min_hits

SEED = 1


def check_small(cases: int) -> int:
    """How many random cases differ from the best of all choices."""
    rng, wrong = random.Random(SEED), 0
    for _ in tqdm(range(cases), unit="case", disable=None, file=sys.stderr):
        prompts = [[rng.randrange(2) for _ in range(rng.randrange(5))] for _ in range(rng.randrange(2, 9))]
        num_pages = rng.randrange(1, 6)
        bound = optimal_hits([TraceRequest(0.0, 1, prompt) for prompt in prompts], num_pages)
        wrong += not bound == best_hits(prompts, num_pages) == min_hits(prompts, num_pages)
    return wrong


def check_trace(path: Path, sizes: list[int]) -> list[dict[str, float | int | bool]]:
    """The bound at each size, twice, and the figure with heads first."""
    requests = read_trace(path)
    prompts = [request.page_ids for request in requests]
    rows: list[dict[str, float | int | bool]] = []
    for size in tqdm(sizes, unit="size", disable=None, file=sys.stderr):
        asked = sum(len(prompt) for prompt in prompts if len(prompt) <= size)
        quick, slow = optimal_hits(requests, size), min_hits(prompts, size)
        heads = min_hits(prompts, size, tails_first=False)
        rows.append(
            {"num_pages": size, "bound": quick / asked, "agrees": quick == slow, "heads_first": heads / asked}
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--sizes", default="1000,3000,10000,30000")
    parser.add_argument("--cases", type=int, default=300)
    args = parser.parse_args()
    wrong = check_small(args.cases)
    print(f"{args.cases} small cases, each choice tried: {wrong} differ")
    rows = check_trace(args.trace, [int(size) for size in args.sizes.split(",")])
    for row in rows:
        said = "as" if row["agrees"] else "NOT as"
        print(
            f"{row['num_pages']:>7} pages: {row['bound']:.4f}, {said} recomputed; "
            f"heads first {row['heads_first']:.4f}"
        )
    print(json.dumps({"cases": args.cases, "wrong": wrong, "trace": rows}))
    return int(wrong > 0 or not all(row["agrees"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
