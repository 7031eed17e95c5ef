"""Serve chats from replicas that Ray adds and removes, and route chats by their beginnings.

    python examples/ray_serve.py [--model demo] [--port 8000] [--max-replicas 3]

The server runs until Ctrl-C or SIGTERM. See docs/guides/ray.md.
"""

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import ray
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from octavo.engine import AsyncEngine, EngineConfig, SamplingParams

# The router of ray.serve.llm, by its private path: the package itself needs vLLM or SGLang.
ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
FIELDS = ("max_tokens", "temperature", "top_p", "seed", "stop", "ignore_eos")

app = FastAPI()


@dataclass
class Chat:
    """The router compares the field ``messages`` of a request with those of earlier ones."""

    messages: list[dict[str, Any]]
    params: dict[str, Any]


@serve.deployment(
    max_ongoing_requests=16,
    ray_actor_options={"num_cpus": 0.5},
    request_router_config=RequestRouterConfig(
        request_router_class=ROUTER, request_router_kwargs={"imbalanced_threshold": 4}
    ),
    health_check_period_s=2.0,
    graceful_shutdown_timeout_s=20.0,
)
class Replica:
    def __init__(self, **options: Any) -> None:
        self._engine = AsyncEngine(EngineConfig(**options))
        self._started: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Start the engine before the first request; later, raise an error if it has ended."""
        if self._started is None:
            self._started = asyncio.create_task(self._engine.start())
        await asyncio.shield(self._started)
        if self._engine.dead_error is not None:
            raise RuntimeError(f"the engine has ended: {self._engine.dead_error!r}")

    async def generate(self, chat: Chat) -> AsyncGenerator[dict[str, Any], None]:
        async for delta in self._engine.generate(chat.messages, SamplingParams(**chat.params)):
            if delta.error is not None:
                raise RuntimeError(delta.error)
            yield {
                "text": delta.text,
                "finish_reason": delta.finish_reason and delta.finish_reason.value,
                "num_tokens": len(delta.token_ids),
                "prompt_tokens": delta.prompt_tokens,
                "cached_tokens": delta.cached_tokens,
                "replica": os.getpid(),
            }

    async def __del__(self) -> None:
        await self._engine.stop(drain_timeout=15.0)


@serve.deployment(ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=256)
@serve.ingress(app)
class Frontend:
    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(stream=True)

    @app.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Any:
        body = await request.json()
        params = {name: body[name] for name in FIELDS if body.get(name) is not None}
        chunks = self._replicas.generate.remote(Chat(body["messages"], params))
        answer = {"id": f"chatcmpl-{time.time_ns():x}", "created": int(time.time()), "model": body["model"]}
        if body.get("stream"):
            return StreamingResponse(events(answer, chunks), media_type="text/event-stream")
        text, num_tokens, last = "", 0, dict[str, Any]()
        async for last in chunks:
            text += last["text"]
            num_tokens += last["num_tokens"]
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": last["finish_reason"]}
        usage = {
            "prompt_tokens": last["prompt_tokens"],
            "completion_tokens": num_tokens,
            "total_tokens": last["prompt_tokens"] + num_tokens,
            "prompt_tokens_details": {"cached_tokens": last["cached_tokens"]},
        }
        fingerprint = f"replica-{last['replica']}"
        return JSONResponse(
            answer
            | {
                "object": "chat.completion",
                "choices": [choice],
                "usage": usage,
                "system_fingerprint": fingerprint,
            }
        )


async def events(head: dict[str, Any], chunks: Any) -> AsyncGenerator[str, None]:
    head["object"] = "chat.completion.chunk"
    async for chunk in chunks:
        choice = {"index": 0, "delta": {"content": chunk["text"]}, "finish_reason": chunk["finish_reason"]}
        yield f"data: {json.dumps(head | {'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-replicas", type=int, default=3)
    args = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    scaling = AutoscalingConfig(
        min_replicas=1,
        max_replicas=args.max_replicas,
        target_ongoing_requests=3,
        metrics_interval_s=0.5,
        look_back_period_s=2,
        upscale_delay_s=1,
        downscale_delay_s=8,
    )
    replicas = Replica.options(autoscaling_config=scaling).bind(model=args.model, threads=1, max_running=16)
    try:
        serve.run(Frontend.bind(replicas))
        print(f"ready: http://127.0.0.1:{args.port}/v1", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
