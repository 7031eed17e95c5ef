from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from octavo.block_manager import BlockManager, RecurrentState
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.executor.base import ModelRunner
from octavo.engine.kv_store.transfer import PageTransfer
from octavo.engine.tokenizer.tokenizer import Tokenizer
from octavo.scheduler import Limits, Scheduler

from .drive import request_of, step_of

SEED = 1
SUFFIX_TOKENS = 32  # tokens of a prompt after the shared prefix
ANSWER_TOKENS = 8


def answer_of(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Chats:
    """Conversations in rotation: each turn repeats the conversation and adds to it."""

    conversations: int = 6
    turns: int = 4
    system_tokens: int = 128
    turn_tokens: int = 64

    @property
    def longest(self) -> int:
        return self.system_tokens + self.turns * (self.turn_tokens + ANSWER_TOKENS)

    def pages(self, page_size: int) -> int:
        """Return the number of pages that all conversations need if they share no page."""
        return self.conversations * -(-self.longest // page_size)


@dataclass(frozen=True, slots=True)
class Served:
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a workload."""

    num_pages: int
    hit_ratio: float
    ttft_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Bench:
    def __init__(self, config: EngineConfig, runner: ModelRunner, tokenizer: Tokenizer) -> None:
        self.info = runner.info
        self._config = config
        self._runner = runner
        self._tokenizer = tokenizer
        self._rng = np.random.default_rng(SEED)

    def core(
        self,
        num_pages: int | None = None,
        *,
        prefix_cache: bool = True,
        used: bool = False,
        states: RecurrentState | None = None,
    ) -> EngineCore:
        blocks = BlockManager(
            num_pages or self.info.num_pages,
            self.info.page_size,
            prefix_cache=prefix_cache,
            states=states or self.info.states,
        )
        if used:
            words = self.tokens(blocks.num_pages * blocks.page_size)
            table = blocks.open(words)
            assert blocks.reserve(table, len(words)), "a new pool has room for all its pages"
            if blocks.states is not None:
                blocks.plan_snapshots(table, 0, len(words), num_known=len(words))
            blocks.commit(table, words, len(words))
            blocks.close(table)
        limits = Limits(max_step_tokens=self._config.max_step_tokens, max_running=self._config.max_running)
        transfer = PageTransfer(self._runner, blocks)
        return EngineCore(self._runner, self._tokenizer, blocks, Scheduler(blocks, limits), transfer=transfer)

    def tokens(self, count: int) -> list[int]:
        return [int(token) for token in self._rng.integers(0, self.info.vocab_size, count)]

    def serve(
        self, core: EngineCore, prompt: list[int], max_tokens: int = ANSWER_TOKENS, salt: bytes = b""
    ) -> Served:
        """Serve one request to its end. Raises RequestFailed."""
        request = request_of(core, prompt, answer_of(max_tokens), salt=salt)
        began, first = time.perf_counter(), None
        core.add(request)
        answer: list[int] = []
        while core.has_work:
            for _, tokens in step_of(core):
                answer += tokens
                first = first or time.perf_counter()
        assert first is not None
        return Served(len(prompt), request.num_cached, first - began, tuple(answer))


def warm_against_cold(bench: Bench, num_tokens: int, runs: int) -> dict[str, Any]:
    """Return median times to first token with a new and with a cached prefix of ``num_tokens``.

    With recurrent layers the third prompt counts as warm, because the second creates the snapshot.
    """
    cold, warm = [], []
    for _ in range(runs):
        core, shared = bench.core(), bench.tokens(num_tokens)
        cold.append(bench.serve(core, shared + bench.tokens(SUFFIX_TOKENS)))
        if bench.info.states is not None:
            bench.serve(core, shared + bench.tokens(SUFFIX_TOKENS))
        warm.append(bench.serve(core, shared + bench.tokens(SUFFIX_TOKENS)))
    cold_s, warm_s = (statistics.median(served.ttft_s for served in each) for each in (cold, warm))
    return {
        "prefix_tokens": num_tokens,
        "cold_s": cold_s,
        "warm_s": warm_s,
        "warm_share": warm_s / cold_s,
        "cached_tokens": warm[0].cached_tokens,
    }


def converse(
    bench: Bench,
    chats: Chats,
    num_pages: int,
    *,
    prefix_cache: bool = True,
    salts: bool = False,
    states: RecurrentState | None = None,
    done: Callable[[], object] = lambda: None,
) -> Outcome:
    """Serve the turns of all conversations; with ``salts``, each conversation has a different salt."""
    core = bench.core(num_pages, prefix_cache=prefix_cache, states=states)
    rng = np.random.default_rng(SEED)

    def words(count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, bench.info.vocab_size, count)]

    system = words(chats.system_tokens)
    said = [list(system) for _ in range(chats.conversations)]
    served: list[Served] = []
    later: list[float] = []
    for turn in range(chats.turns):
        for number, history in enumerate(said):
            history.extend(words(chats.turn_tokens))
            result = bench.serve(core, list(history), salt=b"%d" % number if salts else b"")
            history.extend(result.answer)
            served.append(result)
            if turn:
                later.append(result.ttft_s)
            done()
    found = sum(each.cached_tokens for each in served)
    asked = sum(each.prompt_tokens for each in served)
    return Outcome(num_pages, found / asked, statistics.median(later))


def pool_sizes(pages: int, smallest: int) -> Iterator[int]:
    """Yield pool sizes from a quarter to all of ``pages``; each fits the longest conversation."""
    for eighths in (2, 3, 4, 6, 8):
        if (size := pages * eighths // 8 + 1) > smallest:
            yield size
