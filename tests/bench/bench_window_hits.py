"""Prompt tokens found in the prefix cache with a residual window, for synthetic traffic.

    python tests/bench/bench_window_hits.py [--pages 2000] [--residual 276] [--seed 1]

No model runs. Up to 8 sequences run at once, in chunks of 512 tokens, with pools as planned for 2,000 pages.
"unbounded": residual pages for all tokens. The last line is JSON."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

from octavo.block_manager import BlockManager, FullAttention, PageTable, ResidualWindow
from octavo.block_manager.kv_group import PassedFirst

PAGE, CHUNK, RUNNING = 32, 512, 8
Request = tuple[list[int], int]  # (prompt, number of generated tokens)


class Traffic:
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._next = itertools.count()

    def tokens(self, count: int) -> list[int]:
        return list(itertools.islice(self._next, count))

    def documents(self, number: int) -> list[Request]:
        texts = [self.tokens(1000) for _ in range(number)]
        rounds = (self._rng.sample(texts, number) for _ in range(5))
        return [(text + self.tokens(30), 60) for texts in rounds for text in texts]

    def system_prompts(self, number: int) -> list[Request]:
        prompts = [self.tokens(600) for _ in range(number)]
        ranks = (min(int(self._rng.paretovariate(1.0)) - 1, number - 1) for _ in range(500))
        return [(prompts[rank] + self.tokens(300), 100) for rank in ranks]

    def conversations(self, number: int) -> list[Request]:
        texts = [self.tokens(400) for _ in range(number)]
        order = [index for index in range(number) for _ in range(6)]
        self._rng.shuffle(order)
        requests = []
        for index in order:
            texts[index] = texts[index] + self.tokens(300)
            requests.append((texts[index], 1))
            texts[index] = texts[index] + self.tokens(200)
        return requests


@dataclass(slots=True)
class Running:
    table: PageTable
    tokens: list[int]
    num_prompt: int


def share_found(requests: list[Request], pages: int, residual: int) -> float:
    """Return the share of prompt tokens found, between 0 and 1."""
    groups = (
        FullAttention(num_pages=pages),
        ResidualWindow(num_pages=residual, window=PAGE + 1, residual_of=0),
    )
    blocks = BlockManager(groups, PAGE, max_chunk=CHUNK)
    waiting, running = deque(requests), list[Running]()
    answers = itertools.count(2**30)
    found = 0
    while waiting or running:
        while waiting and len(running) < RUNNING:
            prompt, num_output = waiting[0]
            table = blocks.open(prompt)
            tokens = prompt + list(itertools.islice(answers, num_output))
            if not blocks.reserve(table, table.num_written + 1, ahead=len(tokens)):
                blocks.close(table)
                break
            waiting.popleft()
            found += table.num_written
            running.append(Running(table, tokens, len(prompt)))
        budget = CHUNK
        for each in list(running):
            written = each.table.num_written
            step = min(budget, each.num_prompt - written) if written < each.num_prompt else PAGE
            stop = min(written + step, len(each.tokens))
            if stop == written or not blocks.reserve(each.table, stop):
                continue
            budget -= step if written < each.num_prompt else 0
            blocks.commit(each.table, each.tokens, stop)
            if stop == len(each.tokens):
                blocks.close(each.table)
                running.remove(each)
    return found / sum(len(prompt) for prompt, _ in requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=2000)
    parser.add_argument("--residual", type=int, default=276)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    kinds: dict[str, Callable[[Traffic], list[Request]]] = {
        "12 documents of 1,000 tokens": lambda traffic: traffic.documents(12),
        "30 documents of 1,000 tokens": lambda traffic: traffic.documents(30),
        "10 system prompts of 600 tokens": lambda traffic: traffic.system_prompts(10),
        "40 system prompts of 600 tokens": lambda traffic: traffic.system_prompts(40),
        "40 conversations": lambda traffic: traffic.conversations(40),
        "100 conversations": lambda traffic: traffic.conversations(100),
    }
    rows = []
    for name, made in kinds.items():
        requests = made(Traffic(args.seed))
        with mock.patch.object(PassedFirst, "release_passed", PassedFirst.release):
            alike = share_found(requests, args.pages, args.residual)
        passed = share_found(requests, args.pages, args.residual)
        unbounded = share_found(requests, args.pages, args.pages)
        rows.append({"traffic": name, "alike": alike, "passed_first": passed, "unbounded": unbounded})
        print(
            f"{name:32} alike {alike:.3f}  passed first {passed:.3f}  unbounded {unbounded:.3f}", flush=True
        )
    print(json.dumps({"bench": "window hits", **vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
