from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import TypeAlias

from octavo.proto import generation_pb2 as pb
from octavo.proto import generation_pb2_grpc

from ...api.errors import (
    EngineDead,
    EngineStopping,
    InvalidRequest,
    Overloaded,
    RequestFailed,
)
from ...api.outputs import Delta
from ...api.reranking import RerankPrompt, check_top_n, ranked
from ...api.sampling_params import Pooling
from ..packed_ids import ids_of
from ..request_handler import MAX_REQUEST_ID, RequestHandler
from ..reranking import score_documents
from ..status import Context
from ..tokenization import detokenize, tokenize
from . import messages

BATCH_CONCURRENCY = 256  # concurrent requests of one GenerateMany stream
BATCH_BACKLOG = 16  # unread responses of one GenerateMany stream

_POOLING: Mapping[int, Pooling] = {
    pb.POOLING_UNSPECIFIED: "last",
    pb.POOLING_LAST: "last",
    pb.POOLING_MEAN: "mean",
}
_WORDS = ("instruction", "template", "yes", "no")

BatchItem: TypeAlias = "pb.GenerateResponse | asyncio.Future[None] | Exception | None"


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self._engine = handler.engine

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        failure, responses = "", messages.Responses()
        async with aclosing(self._serve(request, context)) as deltas:
            async for delta in deltas:
                make = functools.partial(responses.of, delta)
                response = await self._handler.message_of(delta, make)
                failure = failure or response.error.message
                await self._handler.writer.write(context, response)
        if failure:
            raise RequestFailed(failure)

    async def GenerateMany(self, requests: AsyncIterator[pb.GenerateRequest], context: Context) -> None:
        output: asyncio.Queue[BatchItem] = asyncio.Queue(BATCH_BACKLOG)
        reader = asyncio.create_task(self._serve_batch(requests, output, context))
        try:
            while (item := await output.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, asyncio.Future):
                    if not item.done():
                        item.set_result(None)
                    continue
                await self._handler.writer.write(context, item)
        finally:
            reader.cancel()
            await asyncio.wait([reader])

    async def _serve_batch(
        self,
        requests: AsyncIterator[pb.GenerateRequest],
        output: asyncio.Queue[BatchItem],
        context: Context,
    ) -> None:
        slots, active = asyncio.Semaphore(BATCH_CONCURRENCY), _Activity()
        large = asyncio.Lock()

        async def serve(request: pb.GenerateRequest) -> None:
            responses = messages.Responses()
            try:
                async with aclosing(self._serve(request, context)) as deltas:
                    async for delta in deltas:
                        make = functools.partial(responses.of, delta)
                        if delta.prompt_logprobs is None:
                            await output.put(await self._handler.message_of(delta, make))
                            continue
                        async with large:
                            await output.put(await self._handler.message_of(delta, make))
                            written = asyncio.get_running_loop().create_future()
                            await output.put(written)
                            await written
            except Exception as error:
                fatal = isinstance(error, EngineDead) and not isinstance(error, EngineStopping)
                await output.put(error if fatal else _refusal(request, error))
            finally:
                active.end()
                slots.release()

        try:
            async with asyncio.TaskGroup() as group:
                await slots.acquire()
                async for request in _until_idle(requests, active, self._handler.writer.timeout_s):
                    active.begin()
                    group.create_task(serve(request))
                    await slots.acquire()
        except ExceptionGroup as group:
            await output.put(group.exceptions[0])
        else:
            await output.put(None)

    def _serve(self, request: pb.GenerateRequest, context: Context) -> AsyncGenerator[Delta, None]:
        prompt, params = messages.with_tools(
            request,
            messages.prompt_of(request),
            messages.params_of(request.sampling),
            self._engine.tokenizer,
        )
        final_only = messages.is_final_only(request)
        return self._handler.generate(
            prompt, params, final_only=final_only, **messages.asked_of(request, context)
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        match request.WhichOneof("input"):
            case "text":
                special = request.add_special_tokens if request.HasField("add_special_tokens") else True
                ids = await tokenize(self._handler, request.text, context, add_special_tokens=special)
            case "chat":
                ids = await tokenize(self._handler, messages.chat_prompt(request.chat), context)
            case _:
                raise InvalidRequest("the request has no input; set one of text and chat")
        return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        ids = ids_of(request, request.token_ids)
        return pb.DetokenizeResponse(text=await detokenize(self._handler, ids, context))

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        if request.pooling not in _POOLING:
            known = ", ".join(pb.Pooling.keys())
            raise InvalidRequest(f"pooling {request.pooling} is unknown; use one of {known}")
        asked = messages.asked_of(request, context)
        asked["request_id"] = asked["request_id"] or uuid.uuid4().hex
        vector, delta = await self._handler.embed(
            messages.prompt_of(request),
            pooling=_POOLING[request.pooling],
            dimensions=request.dimensions if request.HasField("dimensions") else None,
            normalize=request.normalize if request.HasField("normalize") else True,
            **asked,
        )
        return pb.EmbedResponse(request_id=asked["request_id"], embedding=vector, usage=_usage([delta]))

    async def Rerank(self, request: pb.RerankRequest, context: Context) -> pb.RerankResponse:
        """Return the scores of all documents. Raises an error if any document fails."""
        top_n = request.top_n if request.HasField("top_n") else None
        check_top_n(top_n)
        prompt = RerankPrompt(**{name: getattr(request, name) for name in _WORDS if request.HasField(name)})
        asked = messages.asked_of(request, context)
        scores, deltas = await score_documents(
            self._handler, prompt, request.query, request.documents, **asked
        )
        response = pb.RerankResponse()
        for document in ranked(scores, top_n):
            response.results.add(index=document.index, score=document.score)
        response.usage.CopyFrom(_usage(deltas))
        return response

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return pb.AbortResponse(request_ids=await self._handler.abort(request.request_ids, context=context))

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        info = await self._handler.load_adapter(
            request.name, request.path, context=context, replace=request.replace
        )
        return pb.LoadAdapterResponse(adapter=messages.adapter_message(info))

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: Context
    ) -> pb.UnloadAdapterResponse:
        await self._handler.unload_adapter(request.name, context=context)
        return pb.UnloadAdapterResponse()

    async def ListAdapters(
        self, _request: pb.ListAdaptersRequest, context: Context
    ) -> pb.ListAdaptersResponse:
        infos = self._handler.adapters(context).values()
        return pb.ListAdaptersResponse(adapters=map(messages.adapter_message, infos))

    async def GetModelInfo(
        self, _request: pb.GetModelInfoRequest, _context: Context
    ) -> pb.GetModelInfoResponse:
        return messages.model_info_message(self._engine.info, self._engine.tokenizer)

    async def GetServerInfo(
        self, _request: pb.GetServerInfoRequest, _context: Context
    ) -> pb.GetServerInfoResponse:
        gauges = self._engine.gauges()
        handler = self._handler
        return messages.server_info_message(
            gauges, ready_since=handler.ready_since, draining=handler.draining
        )


class _Activity:
    def __init__(self) -> None:
        self._num_active = 0
        self._idle_since = asyncio.get_running_loop().time()

    def begin(self) -> None:
        self._num_active += 1

    def end(self) -> None:
        self._num_active -= 1
        self._idle_since = asyncio.get_running_loop().time()

    def idle_s(self) -> float:
        return 0.0 if self._num_active else asyncio.get_running_loop().time() - self._idle_since


async def _until_idle(
    requests: AsyncIterator[pb.GenerateRequest], active: _Activity, patience_s: float
) -> AsyncGenerator[pb.GenerateRequest, None]:

    async def read() -> pb.GenerateRequest | None:
        return await anext(requests, None)

    while True:
        reading = asyncio.ensure_future(read())
        try:
            while not (await asyncio.wait((reading,), timeout=patience_s - active.idle_s()))[0]:
                if active.idle_s() >= patience_s:
                    raise Overloaded(
                        f"the stream was idle for {patience_s:g} s and was ended; open another stream when "
                        "there are requests, or start the server with a longer --write-timeout"
                    )
        finally:
            reading.cancel()
        if (request := reading.result()) is None:
            return
        yield request


def _refusal(request: pb.GenerateRequest, error: Exception) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        request_id=request.request_id[:MAX_REQUEST_ID],
        finish_reason=pb.FINISH_REASON_ERROR,
        error=messages.error_message(error),
    )


def _usage(deltas: Sequence[Delta]) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=sum(delta.prompt_tokens for delta in deltas),
        cached_tokens=sum(delta.cached_tokens for delta in deltas),
    )
