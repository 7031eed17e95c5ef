from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

from octavo.proto import cache_pb2 as pb
from octavo.proto import cache_pb2_grpc

from ...api.errors import EventsGone, InvalidRequest, NotConfigured
from ...core import commands
from ...core.commands import AnswerT, Command, RequestTokens
from ...core.snapshots import RunCommand, below, load, save_all, save_prompt
from ...frontend.text_executor import call_on_daemon
from ..request_handler import RequestHandler, checked_id, own_name
from ..status import Context
from . import cache_messages as messages

ResultT = TypeVar("ResultT")

HEARTBEAT_S = 10.0


class CacheServicer(cache_pb2_grpc.CacheServicer):
    """Serves octavo.v1.Cache. Tenants see only their own data; only operators change the shared cache."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self._engine = handler.engine
        self._turn = asyncio.Lock()

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        most = messages.num_prefixes(request)
        tenant = self._handler.tenant_of(context)
        salt = self._handler.tenant_salt(context)
        prefix = own_name(tenant, "")
        stats = await self._engine.run_command(commands.get_cache_stats(prefix or None))
        own = {name.removeprefix(prefix): kept for name, kept in stats.pins.items()}
        response = messages.stats_message(stats.totals, self._engine.gauges(), own, hide_salts=bool(tenant))
        decode = self._engine.tokenizer.decode
        for reused in await self._engine.run_command(commands.list_reused_prefixes(salt, most)):
            response.prefixes.append(messages.prefix_message(reused, decode(reused.preview)))
        return response

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        request_id = checked_id(request.request_id)
        if not request_id:
            raise InvalidRequest("request_id is empty; give the id of the request to explain")
        tenant = self._handler.tenant_of(context)
        name = own_name(tenant, request_id)
        found = await self._engine.run_command(commands.explain_request(name))
        return messages.explain_message(
            found,
            request_id,
            page_size=self._engine.info.page_size,
            enabled=self._engine.config.prefix_cache,
            salt_prefix=self._handler.tenant_salt(context),
        )

    async def Save(self, request: pb.SaveRequest, context: Context) -> pb.SaveResponse:
        self._handler.check_operator(context, "save the cache")
        path = self._saved(request.path)
        if request.HasField("prompt"):
            found = await self._prefix(request.prompt, context)
            saved = await self._in_turn(
                partial(save_prompt, self._run_command(), path, list(found.tokens), found.salt, found.media)
            )
        else:
            saved = await self._in_turn(partial(save_all, self._run_command(), path))
        return pb.SaveResponse(**asdict(saved))

    async def Load(self, request: pb.LoadRequest, context: Context) -> pb.LoadResponse:
        self._handler.check_operator(context, "load into the cache")
        loaded = await self._in_turn(partial(load, self._run_command(), self._saved(request.path)))
        return pb.LoadResponse(**asdict(loaded))

    async def _in_turn(self, call: Callable[[], ResultT]) -> ResultT:
        await self._turn.acquire()
        running = asyncio.ensure_future(call_on_daemon(call, name="octavo-snapshots"))
        running.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(running)

    def _saved(self, path: str) -> Path:
        folder = self._engine.config.save_dir
        if folder is None:
            raise NotConfigured("this server has no folder to save to; start it with --save-dir")
        return below(folder, path, what="path")

    def _run_command(self) -> RunCommand:
        loop = asyncio.get_running_loop()

        def ask(command: Command[AnswerT]) -> AnswerT:
            return asyncio.run_coroutine_threadsafe(self._engine.run_command(command), loop).result()

        return ask

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        tenant = self._handler.tenant(context)
        name = own_name(tenant.name, messages.pin_name(request.name))
        found = await self._prefix(request.prefix, context)
        most = tenant.part_of(self._engine.config.max_pinned_pages)
        pinned = await self._engine.run_command(
            commands.pin_prefix(
                name,
                found.tokens,
                found.salt,
                owner=own_name(tenant.name, ""),
                max_pages=most,
                media=found.media,
            )
        )
        return pb.PinResponse(
            num_tokens=pinned.num_tokens, prefix_tokens=len(found.tokens), pinned_pages=pinned.pinned_pages
        )

    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:
        name = own_name(self._handler.tenant_of(context), messages.pin_name(request.name))
        left = await self._engine.run_command(commands.unpin_prefix(name, request.name))
        return pb.UnpinResponse(pinned_pages=left)

    async def Flush(self, _request: pb.FlushRequest, context: Context) -> pb.FlushResponse:
        self._handler.check_operator(context, "flush the cache of all tenants")
        return pb.FlushResponse(num_pages=await self._engine.run_command(commands.flush_cache()))

    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:
        salt, hub = self._handler.tenant_salt(context), self._handler.page_events
        async with hub.watching(self._handler.tenant(context)) as its:
            if request.log_id not in ("", its.log_id):
                raise EventsGone("the server restarted and lost the events; drop log_id and start_number")
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

    async def _prefix(self, prefix: pb.Prefix, context: Context) -> RequestTokens:
        if prefix.WhichOneof("prefix") != "request_id":
            salt = self._handler.salt_of(context, prefix.cache_salt)
            prompt = messages.prompt_of(prefix)
            encoded = await self._engine.prepare(prompt)
            return RequestTokens(tuple(encoded.ids), salt, encoded.media)
        if prefix.cache_salt:
            raise InvalidRequest("cache_salt must be left out with request_id, which has a salt of its own")
        name = own_name(self._handler.tenant_of(context), checked_id(prefix.request_id))
        return await self._engine.run_command(commands.get_request_tokens(name))
