"""The vllm.grpc.engine.VllmEngine service, for the SMG router.

The stubs come from smg-grpc-proto, because a process cannot load a descriptor twice.
"""

from __future__ import annotations

import asyncio
import functools
import time
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

import octavo

from ...api.errors import RequestFailed
from ...api.outputs import FinishReason
from ...vision.reader import MAX_IMAGES
from ..packed_ids import ids_of
from ..request_handler import RequestHandler
from ..status import Context
from . import kv_events, model_files
from . import messages as vllm_messages

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    def __init__(self, handler: RequestHandler, *, adapter: str | None = None) -> None:
        self._handler = handler
        self._adapter = adapter
        self._engine = handler.engine
        self._files = model_files.read_model_files(handler.engine.info.path)
        self._tokenizer_zip: bytes | None = None

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Stream a chunk per delta, then a ``complete`` message per sample."""
        takes_images = self._engine.info.images is not None
        vllm_messages.check_supported(request, takes_images=takes_images)
        params = vllm_messages.params_of(request.sampling_params, default_temperature=self._files.temperature)
        prompt = vllm_messages.prompt_of(request)
        deltas = self._handler.generate(
            prompt,
            params,
            context=context,
            request_id=request.request_id,
            final_only=not request.stream,
            adapter=self._adapter,
        )
        write = self._handler.writer.write
        failure = ""
        async with aclosing(deltas):
            async for delta in deltas:
                if request.stream and delta.token_ids:
                    make = functools.partial(vllm_messages.chunk_of, delta)
                    await write(context, await self._handler.message_of(delta, make))
                if delta.finish_reason is not None:
                    last = replace(delta, prompt_logprobs=None) if request.stream else delta
                    make = functools.partial(vllm_messages.complete_of, last)
                    await write(context, await self._handler.message_of(last, make))
                if delta.finish_reason is FinishReason.ERROR:
                    failure = delta.error or "computing this request failed"
        if failure:
            raise RequestFailed(failure)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        await self._handler.abort(request.request_ids, context=context)
        return pb.AbortResponse()

    async def HealthCheck(self, _request: pb.HealthCheckRequest, _context: Context) -> pb.HealthCheckResponse:
        if self._engine.dead_error is not None:
            return pb.HealthCheckResponse(
                healthy=False, message=f"the engine died: {self._engine.dead_error}"
            )
        if self._handler.draining:
            return pb.HealthCheckResponse(healthy=False, message="the server is draining")
        if self._adapter is not None and self._adapter not in self._engine.adapters:
            return pb.HealthCheckResponse(healthy=False, message=f"no adapter is called {self._adapter!r}")
        return pb.HealthCheckResponse(healthy=True, message="ok")

    async def GetModelInfo(
        self, _request: pb.GetModelInfoRequest, _context: Context
    ) -> pb.GetModelInfoResponse:
        info, files = self._engine.info, self._files
        name = self._adapter or info.name
        return pb.GetModelInfoResponse(
            model_path=name,
            served_model_name=name,
            is_generation=True,
            max_context_length=info.max_model_len,
            max_req_input_len=min(info.max_model_len, info.num_pages * info.page_size) - 1,
            vocab_size=info.vocab_size,
            model_type=files.model_type or info.architecture,
            architectures=files.architectures or (info.architecture,),
            eos_token_ids=sorted(self._engine.tokenizer.eos_ids),
            pad_token_id=files.pad_token_id,
            bos_token_id=files.bos_token_id,
            default_sampling_params_json=files.sampling_json,
            supports_vision=info.images is not None,
        )

    async def GetServerInfo(
        self, _request: pb.GetServerInfoRequest, _context: Context
    ) -> pb.GetServerInfoResponse:
        info, handler = self._engine.info, self._handler
        rules = info.images
        # Routers forward data: URLs, and resize pictures of other URLs themselves.
        media = {} if rules is None else {
            "mm_processor": "inprocess",
            "mm_processor_source": "default",
            "mm_media_ref_schemes": "data",
            "mm_device_do_normalize": True,  # the router then sends 8-bit pixels
            "mm_item_limits": f"image={MAX_IMAGES}",
            "mm_encoder_budget": rules.max_pixels // rules.side**2,
        }  # fmt: skip
        return pb.GetServerInfoResponse(
            active_requests=handler.num_active,
            is_paused=handler.draining,
            last_receive_timestamp=handler.last_request_at,
            uptime_seconds=time.monotonic() - handler.ready_since,
            server_type="vllm-grpc",
            data_parallel_size=1,
            kv_cache_dtype=info.kv_format,
            block_size=info.page_size,
            model_dtype=info.weights,
            attention_backend=info.backend,
            max_num_seqs=self._engine.config.max_running,
            **media,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, _context: Context) -> pb.GetLoadsResponse:
        loads = [self._load()] if not request.dp_rank else []  # rank 0 is the only rank
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=octavo.__version__,
            dp_rank_count=1,
            loads=loads,
        )

    def _load(self) -> pb.SchedulerLoad:
        gauges, info, handler = self._engine.gauges(), self._engine.info, self._handler
        most = self._engine.config.max_running
        return pb.SchedulerLoad(
            dp_rank=0,
            num_running_reqs=gauges.num_running,
            num_waiting_reqs=gauges.num_waiting,
            num_total_reqs=gauges.num_running + gauges.num_waiting,
            num_used_tokens=gauges.pages_held * info.page_size,
            max_total_num_tokens=info.num_pages * info.page_size,
            token_usage=gauges.pages_held / info.num_pages,
            gen_throughput=handler.generated.per_second(),
            cache_hit_rate=handler.num_cached_tokens / max(handler.num_prompt_tokens, 1),
            utilization=gauges.num_running / most,
            max_running_requests=most,
        )

    async def GetTokenizer(self, _request: common_pb2.GetTokenizerRequest, context: Context) -> None:
        """Stream a zip of the tokenizer files."""
        if self._tokenizer_zip is None:
            self._tokenizer_zip = await asyncio.to_thread(
                model_files.tokenizer_zip, self._files.path, self._engine.info.chat_template
            )
        if not self._tokenizer_zip:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this model's folder has no tokenizer files")
        for data, sha256 in model_files.chunks(self._tokenizer_zip):
            await self._handler.writer.write(context, common_pb2.GetTokenizerChunk(data=data, sha256=sha256))

    async def SubscribeKvEvents(self, request: common_pb2.SubscribeKvEventsRequest, context: Context) -> None:
        await kv_events.write_kv_events(self._handler, request, context, adapter=self._adapter)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        return await kv_events.flush_cache(self._handler, request, context)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Return the normalized hidden state of the last token, which is vLLM's default."""
        ids = ids_of(request.tokenized, request.tokenized.input_ids)
        vector, delta = await self._handler.embed(
            ids, context=context, request_id=request.request_id, adapter=self._adapter
        )
        return pb.EmbedResponse(
            embedding=vector, prompt_tokens=delta.prompt_tokens, embedding_dim=len(vector)
        )

    async def StartProfile(self, _request: common_pb2.StartProfileRequest, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server has no profiler; see `octavo bench`")

    StopProfile = StartProfile
