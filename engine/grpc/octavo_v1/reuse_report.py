"""Reports of the prefixes that save the most tokens, for GetStats, built at most once per interval."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo.proto import cache_pb2 as pb

from ...core.commands import ListReusedPrefixes
from ...inspection.reuse_tree import ReusedPrefix, ReuseTree
from ..interface import Engine
from . import cache_messages as messages

KEEP_S = 1.0  # seconds for which a tree is at least reused
REST = 10  # times the build time for which a tree is reused, so building takes at most a tenth of a thread
PREVIEW_TOKENS = 24


@dataclass(slots=True)
class _Report:
    """Tree of one tenant, and the texts of nodes shown so far."""

    tree: ReuseTree
    texts: dict[tuple[int, ...], str]


class ReuseReports:
    """The latest tree of each tenant. Trees are built on another thread, one at a time; concurrent calls
    share one. Lives on the event loop."""

    def __init__(
        self, engine: Engine, *, keep_s: float = KEEP_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._keep_s = keep_s
        self._clock = clock
        self._reports: dict[bytes, asyncio.Task[_Report]] = {}  # by tenant's salt prefix
        self._fresh_until: dict[bytes, float] = {}
        self._drawing = asyncio.Lock()

    async def best(self, salt_prefix: bytes, most: int) -> list[pb.PrefixStats]:
        """Return the ``most`` nodes that saved most, of prefixes whose salts begin with ``salt_prefix``."""
        report = await self._report(salt_prefix)
        return [
            messages.prefix_message(node, self._text(report, node.tokens)) for node in report.tree.best(most)
        ]

    async def _report(self, salt_prefix: bytes) -> _Report:
        task = self._reports.get(salt_prefix)
        if task is None or (task.done() and self._clock() >= self._fresh_until[salt_prefix]):
            task = asyncio.create_task(self._draw(salt_prefix))
            self._reports[salt_prefix] = task
        return await asyncio.shield(task)  # shielded, because other calls wait for it, too

    async def _draw(self, salt_prefix: bytes) -> _Report:
        self._fresh_until[salt_prefix] = 0.0  # after a failure the next call tries again
        async with self._drawing:
            prefixes = await self._engine.ask(ListReusedPrefixes(salt_prefix))
            began = self._clock()
            report = await asyncio.to_thread(self._drawn, prefixes)
            now = self._clock()
        self._fresh_until[salt_prefix] = now + max(self._keep_s, REST * (now - began))
        return report

    def _drawn(self, prefixes: list[ReusedPrefix]) -> _Report:
        """Build the tree with the texts that a response may show; runs on another thread."""
        report = _Report(ReuseTree(prefixes, self._engine.info.page_size, preview=PREVIEW_TOKENS), {})
        for node in report.tree.best(messages.MAX_PREFIXES):
            self._text(report, node.tokens)
        return report

    def _text(self, report: _Report, tokens: tuple[int, ...]) -> str:
        text = report.texts.get(tokens)
        if text is None:
            text = report.texts[tokens] = self._engine.tokenizer.decode(tokens)
        return text
