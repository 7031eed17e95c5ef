"""Worker for NVIDIA Dynamo: ``python -m octavo.integrations.dynamo MODEL``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

try:
    from dynamo.common.backend import engine as dynamo
    from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
    from dynamo.common.backend.run import run
    from dynamo.common.backend.worker import WorkerConfig
    from dynamo.common.constants import DisaggregationMode
    from dynamo.llm.exceptions import EngineShutdown, InvalidArgument
except ImportError as error:
    raise ImportError(
        f"octavo.integrations.dynamo needs ai-dynamo ({error}); install it as docs/guides/dynamo.md says"
    ) from error

from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import EngineDead, InvalidConfig, RequestFailed
from octavo.engine.api.outputs import Delta, FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.stats import Observer, StepRecord
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.arguments.options import (
    add_engine_arguments,
    add_log_level_argument,
    engine_config,
    set_up_logging,
)
from octavo.engine.arguments.usage import Parser, seconds
from octavo.engine.core import commands
from octavo.engine.frontend.async_engine import AsyncEngine
from octavo.engine.grpc.page_events import PageEventHub
from octavo.engine.grpc.vllm.model_files import read_model_files
from octavo.engine.kv_events.zmq_publisher import KvEventOptions, KvEventPublisher
from octavo.engine.memory.model_files import resolve_model, served_name

OPTIONS = {
    "--namespace": ("DYN_NAMESPACE", "dynamo"),
    "--discovery-backend": ("DYN_DISCOVERY_BACKEND", "etcd"),
    "--request-plane": ("DYN_REQUEST_PLANE", "tcp"),
    "--event-plane": ("DYN_EVENT_PLANE", "zmq"),
    "--dyn-tool-call-parser": ("DYN_TOOL_CALL_PARSER", None),
    "--dyn-reasoning-parser": ("DYN_REASONING_PARSER", None),
}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "n")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
MODES = ("agg", "prefill", "decode")
POLL_S, MAX_POLL_S = 0.005, 0.1  # seconds between looks at the pages that are being written
WRITTEN_S = 5.0  # seconds that a prefill worker waits for them
WHOLE = "max_tokens:"  # annotation of a request: its max_tokens before Dynamo reduced it


def params_of(request: Mapping[str, Any], defaults: Mapping[str, float]) -> SamplingParams:
    sampling, stop = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    given: dict[str, Any] = {"temperature": 1.0, **defaults}
    given |= {name: value for name in SAMPLING + PENALTIES if (value := sampling.get(name)) is not None}
    given |= {name: value for name in ("max_tokens", "ignore_eos") if (value := stop.get(name)) is not None}
    given["top_k"] = max(0, given.get("top_k", 0))
    given["stop_ids"] = tuple(stop.get("stop_token_ids_hidden") or ())
    given["logprobs"] = (request.get("output_options") or {}).get("logprobs")
    if guided := sampling.get("guided_decoding"):
        names = {"json": "json_schema"} | {name: name for name in ("regex", "grammar", "structural_tag")}
        found = {ours: value for name, ours in names.items() if (value := guided.get(name)) is not None}
        given["structured"] = StructuredOutput(**found, choice=tuple(guided.get("choice") or ()))
    given["min_tokens"] = stop.get("min_tokens") or 0
    if (rest := given.get("max_tokens")) is not None:
        wholes = [text for text in request.get("annotations") or () if text.startswith(WHOLE)]
        given["max_tokens"] = max([rest, *(int(text.removeprefix(WHOLE)) for text in wholes)])
        given["num_output_tokens"] = given["max_tokens"] - rest
        # Without the annotation, output that Dynamo has counted in max_tokens counts again in min_tokens.
        given["min_tokens"] = min(given["min_tokens"], given["max_tokens"])
    return SamplingParams(**given)


class Load(Observer):
    def __init__(self) -> None:
        self.publisher: Any = None
        self.num_pages = 1
        self._held = 0

    def step(self, record: StepRecord) -> None:
        if self.publisher is not None and (held := record.gauges.pages_held) != self._held:
            self._held = held
            self.publisher.publish(0, ComponentSnapshot(held, self.num_pages, held / self.num_pages, 0))

    def rejected(self, reason: str) -> None: ...


class OctavoWorker(dynamo.LLMEngine):
    def __init__(self, config: EngineConfig, drain_timeout: float, mode: DisaggregationMode) -> None:
        if mode is not DisaggregationMode.AGGREGATED and config.remote_cache is None:
            raise InvalidConfig(
                f"disaggregation_mode must be agg without remote_cache, got {mode.value}; give --remote-cache"
            )
        self._is_prefill = mode is DisaggregationMode.PREFILL
        self._load = Load()
        self._engine = AsyncEngine(config, observer=self._load)
        self._drain_timeout = drain_timeout
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-dynamo-")
        self._events = KvEventPublisher(KvEventOptions(endpoint=f"ipc://{self._folder.name}/kv-events"))
        self._defaults: dict[str, float] = {}

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[OctavoWorker, WorkerConfig]:
        parser = Parser(prog="python -m octavo.integrations.dynamo", description=__doc__)
        parser.add_argument("model", metavar="MODEL", help="model to serve")
        group = parser.add_argument_group("Dynamo")
        for option, (variable, default) in OPTIONS.items():
            group.add_argument(
                option, default=os.environ.get(variable, default), help=f"Dynamo's option ({variable})"
            )
        work = "work of this worker: prompts, output, or both (agg)"
        group.add_argument("--disaggregation-mode", choices=MODES, default="agg", help=work)
        drain = "time allowed for running requests to finish after SIGTERM"
        group.add_argument("--drain-timeout", type=seconds, metavar="SECONDS", default=30.0, help=drain)
        add_log_level_argument(parser, "info")
        add_engine_arguments(parser)
        args = parser.parse_args(argv)
        set_up_logging(args)
        config = engine_config(args)
        path = resolve_model(config.model, config.revision)
        mode = DisaggregationMode(args.disaggregation_mode)
        return cls(config, args.drain_timeout, mode), WorkerConfig(
            component="prefill" if mode is DisaggregationMode.PREFILL else "octavo",
            disaggregation_mode=mode,
            model_name=str(path),
            served_model_name=(config.served_model_name or (served_name(config.model),))[0],
            namespace=args.namespace,
            discovery_backend=args.discovery_backend,
            request_plane=args.request_plane,
            event_plane=args.event_plane,
            tool_call_parser=args.dyn_tool_call_parser,
            reasoning_parser=args.dyn_reasoning_parser,
        )

    async def start(self, worker_id: int) -> dynamo.EngineConfig:
        del worker_id
        await self._engine.start()
        self._events.start(self._engine, PageEventHub(self._engine))
        info, config = self._engine.info, self._engine.config
        self._load.num_pages = info.num_pages
        self._defaults = read_model_files(info.path).sampling
        return dynamo.EngineConfig(
            model=str(info.path),
            served_model_name=info.name,
            model_aliases=list(info.aliases),
            llm=dynamo.LlmRegistration(
                context_length=info.max_model_len,
                kv_cache_block_size=info.page_size,
                total_kv_blocks=info.num_pages,
                max_num_seqs=config.max_running,
                max_num_batched_tokens=config.max_step_tokens,
            ),
        )

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        num_generated: Counter[int] = Counter()
        salt = (request.get("routing") or {}).get("cache_salt") or ""
        try:
            params = params_of(request, self._defaults)
            if self._is_prefill:
                params = replace(params, max_tokens=1, min_tokens=0, num_output_tokens=0, n=1)
            earlier = params.num_output_tokens
            async for delta in self._engine.generate(
                list(request["token_ids"]), params, request_id=context.id(), salt=salt.encode()
            ):
                num_generated[delta.index] += len(delta.token_ids)
                chunk = chunk_of(delta, earlier, earlier * params.n + num_generated.total())
                if self._is_prefill and delta.finish_reason is not None:
                    await self._pages_written(request["token_ids"], salt.encode())
                    chunk["disaggregated_params"] = {"remote_cache": True}
                yield chunk
        except ValueError as error:
            raise InvalidArgument(str(error)) from error
        except EngineDead as error:
            raise EngineShutdown(str(error)) from error

    async def _pages_written(self, token_ids: list[int], salt: bytes) -> None:
        pause = POLL_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITTEN_S):
                while await self._engine.run_command(commands.count_unwritten_pages(token_ids, salt)):
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, MAX_POLL_S)

    async def is_quiescent(self) -> bool:
        return True

    async def abort(self, context: Any) -> None:
        await self._engine.abort(context.id())

    async def kv_event_sources(self) -> list[ZmqSource]:
        return [ZmqSource(endpoint=f"ipc://{self._folder.name}/kv-events")]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._load.publisher = publisher

    async def cleanup(self) -> None:
        await self._engine.stop(self._drain_timeout)
        await self._events.close()
        self._folder.cleanup()


def chunk_of(delta: Delta, num_earlier: int, num_output: int) -> dict[str, Any]:
    if delta.finish_reason is FinishReason.ERROR:
        raise RequestFailed(delta.error)
    chunk: dict[str, Any] = {"token_ids": list(delta.token_ids), "index": delta.index}
    if delta.logprobs:
        chunk["log_probs"] = [each.logprob for each in delta.logprobs]
        chunk["top_logprobs"] = [
            [
                {"rank": rank, "token_id": token, "token": None, "logprob": logprob}
                for rank, (token, logprob) in enumerate(each.top, 1)
            ]
            for each in delta.logprobs
        ]
    if (reason := delta.finish_reason) is not None:
        num_prompt = delta.prompt_tokens - num_earlier
        chunk["finish_reason"] = "cancelled" if reason is FinishReason.ABORT else reason.value
        chunk["completion_usage"] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": delta.cached_tokens},
        }
    return chunk


if __name__ == "__main__":
    run(OctavoWorker)
