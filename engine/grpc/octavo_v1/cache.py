from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from octavo.proto import cache_pb2 as pb
from octavo.proto import cache_pb2_grpc

from ...api.errors import EventsGone, InvalidRequest, NotConfigured
from ...core.commands import (
    AnswerT,
    Command,
    ExplainRequest,
    FlushCache,
    GetCacheStats,
    GetRequestTokens,
    ListReusedPrefixes,
    PinPrefix,
    UnpinPrefix,
)
from ...core.snapshots import Ask, below, load, save_all, save_prompt
from ...inspection.reuse_tree import ReusedPrefix, ReuseTree
from ..interface import Engine
from ..request_handler import RequestHandler, checked_id, own_name
from ..status import Context, errors_as_status
from . import cache_messages as messages

ResultT = TypeVar("ResultT")

IDLE_S = 1.0  # seconds without a call before the thread ends


class SnapshotWorker:
    """Runs calls one at a time on a daemon thread, so a hanging disk cannot block the exit."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    async def run(self, call: Callable[[], ResultT]) -> ResultT:
        done: Future[ResultT] = Future()
        with self._lock:
            self._calls.put((done, call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="octavo-snapshots", daemon=True)
                self._thread.start()
        return await asyncio.wrap_future(done)

    def _work(self) -> None:
        while True:
            try:
                done, call = self._calls.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if not self._calls.empty():
                        continue
                    self._thread = None
                    return
            if not done.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)


HEARTBEAT_S = 10.0


class CacheServicer(cache_pb2_grpc.CacheServicer):
    """Serves octavo.v1.Cache. Tenants see only their own data; only operators change the shared cache."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self._engine = handler.engine
        self._reports = ReuseReports(handler.engine)
        self._worker = SnapshotWorker()

    @errors_as_status
    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        most = messages.num_prefixes(request)
        tenant = self._handler.tenant_of(context)
        salt = self._handler.tenant_salt(context)
        prefix = own_name(tenant, "")
        stats = await self._engine.ask(GetCacheStats(prefix or None))
        own = {name.removeprefix(prefix): kept for name, kept in stats.pins.items()}
        response = messages.stats_message(stats.totals, self._engine.gauges(), own, hide_salts=bool(tenant))
        response.prefixes.extend(await self._reports.best(salt, most))
        return response

    @errors_as_status
    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        request_id = checked_id(request.request_id)
        if not request_id:
            raise InvalidRequest("request_id is empty; give the id of the request to explain")
        tenant = self._handler.tenant_of(context)
        name = own_name(tenant, request_id)
        found = await self._engine.ask(ExplainRequest(name))
        return messages.explain_message(
            found,
            request_id,
            page_size=self._engine.info.page_size,
            enabled=self._engine.config.prefix_cache,
            salt_prefix=self._handler.tenant_salt(context),
        )

    @errors_as_status
    async def Save(self, request: pb.SaveRequest, context: Context) -> pb.SaveResponse:
        self._handler.check_operator(context, "save the cache")
        path = self._saved(request.path)
        if request.HasField("prompt"):
            tokens, salt = await self._prefix(request.prompt, context)
            saved = await self._worker.run(partial(save_prompt, self._ask(), path, tokens, salt))
        else:
            saved = await self._worker.run(partial(save_all, self._ask(), path))
        return pb.SaveResponse(
            num_pages=saved.num_pages,
            num_tokens=saved.num_tokens,
            num_bytes=saved.num_bytes,
            num_missing_pages=saved.num_missing_pages,
        )

    @errors_as_status
    async def Load(self, request: pb.LoadRequest, context: Context) -> pb.LoadResponse:
        self._handler.check_operator(context, "load into the cache")
        loaded = await self._worker.run(partial(load, self._ask(), self._saved(request.path)))
        return pb.LoadResponse(
            num_pages=loaded.num_pages,
            num_tokens=loaded.num_tokens,
            num_known_pages=loaded.num_known_pages,
            num_skipped_pages=loaded.num_skipped_pages,
            converted=loaded.converted,
        )

    def _saved(self, path: str) -> Path:
        folder = self._engine.config.save_dir
        if folder is None:
            raise NotConfigured("this server has no folder to save to; start it with --save-dir")
        return below(folder, path, what="path")

    def _ask(self) -> Ask:
        loop = asyncio.get_running_loop()

        def ask(command: Command[AnswerT]) -> AnswerT:
            return asyncio.run_coroutine_threadsafe(self._engine.ask(command), loop).result()

        return ask

    @errors_as_status
    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        tenant = self._handler.tenant(context)
        name = own_name(tenant.name, messages.pin_name(request.name))
        tokens, salt = await self._prefix(request.prefix, context)
        most = tenant.part_of(self._engine.config.max_pinned_pages)
        pinned = await self._engine.ask(
            PinPrefix(name, tuple(tokens), salt, owner=own_name(tenant.name, ""), max_pages=most)
        )
        return pb.PinResponse(
            num_tokens=pinned.num_tokens, prefix_tokens=len(tokens), pinned_pages=pinned.pinned_pages
        )

    @errors_as_status
    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:
        name = own_name(self._handler.tenant_of(context), messages.pin_name(request.name))
        left = await self._engine.ask(UnpinPrefix(name, request.name))
        return pb.UnpinResponse(pinned_pages=left)

    @errors_as_status
    async def Flush(self, _request: pb.FlushRequest, context: Context) -> pb.FlushResponse:
        self._handler.check_operator(context, "flush the cache of all tenants")
        return pb.FlushResponse(num_pages=await self._engine.ask(FlushCache()))

    @errors_as_status
    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:
        salt, hub = self._handler.tenant_salt(context), self._handler.page_events
        async with hub.watching(self._handler.tenant(context)) as its:
            if request.log_id not in ("", its.log_id):
                raise EventsGone("the server restarted and lost these events; drop log_id and start_number")
            number = request.start_number if request.HasField("start_number") else its.number
            await hub.check_kept(number)
            write = partial(self._handler.writer.write, context)
            await write(pb.WatchResponse(number=number - 1, log_id=its.log_id))
            async with aclosing(hub.events_from(number, heartbeat_s=HEARTBEAT_S)) as stream:
                async for events in stream:
                    for event in events:
                        await write(messages.watch_message(event, salt))
                        number = event.number + 1
                    if not events:
                        await write(pb.WatchResponse(number=number - 1))

    async def _prefix(self, prefix: pb.Prefix, context: Context) -> tuple[list[int], bytes]:
        if prefix.WhichOneof("prefix") != "request_id":
            salt = self._handler.salt_of(context, prefix.cache_salt)
            prompt = messages.prompt_of(prefix, max_tokens=self._engine.info.max_model_len)
            return await self._engine.encode(prompt), salt
        if prefix.cache_salt:
            raise InvalidRequest("cache_salt must be left out with request_id; a request has its own salt")
        name = own_name(self._handler.tenant_of(context), checked_id(prefix.request_id))
        found = await self._engine.ask(GetRequestTokens(name))
        return list(found.tokens), found.salt


KEEP_S = 1.0
REST = 10
PREVIEW_TOKENS = 24


@dataclass(slots=True)
class _Report:
    tree: ReuseTree
    texts: dict[tuple[int, ...], str]


class ReuseReports:
    def __init__(
        self, engine: Engine, *, keep_s: float = KEEP_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._keep_s = keep_s
        self._clock = clock
        self._reports: dict[bytes, asyncio.Task[_Report]] = {}
        self._fresh_until: dict[bytes, float] = {}
        self._drawing = asyncio.Lock()

    async def best(self, salt_prefix: bytes, most: int) -> list[pb.PrefixStats]:
        """Return the prefixes that save the most prefill tokens."""
        report = await self._report(salt_prefix)
        return [
            messages.prefix_message(node, self._text(report, node.tokens)) for node in report.tree.best(most)
        ]

    async def _report(self, salt_prefix: bytes) -> _Report:
        task = self._reports.get(salt_prefix)
        if task is None or (task.done() and self._clock() >= self._fresh_until[salt_prefix]):
            task = asyncio.create_task(self._draw(salt_prefix))
            self._reports[salt_prefix] = task
        return await asyncio.shield(task)

    async def _draw(self, salt_prefix: bytes) -> _Report:
        self._fresh_until[salt_prefix] = 0.0
        async with self._drawing:
            prefixes = await self._engine.ask(ListReusedPrefixes(salt_prefix))
            began = self._clock()
            report = await asyncio.to_thread(self._drawn, prefixes)
            now = self._clock()
        self._fresh_until[salt_prefix] = now + max(self._keep_s, REST * (now - began))
        return report

    def _drawn(self, prefixes: list[ReusedPrefix]) -> _Report:
        report = _Report(ReuseTree(prefixes, self._engine.info.page_size, preview=PREVIEW_TOKENS), {})
        for node in report.tree.best(messages.MAX_PREFIXES):
            self._text(report, node.tokens)
        return report

    def _text(self, report: _Report, tokens: tuple[int, ...]) -> str:
        text = report.texts.get(tokens)
        if text is None:
            text = report.texts[tokens] = self._engine.tokenizer.decode(tokens)
        return text
