"""``octavo bench route``: a recorded trace through the router, by routing policy.

Each page of the trace becomes ``--page-words`` words, and equal pages become equal words. Outputs shrink in
proportion. Each run starts new workers and a new router.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from octavo.engine.api.errors import RequestFailed
from octavo.engine.arguments.options import add_engine_arguments, engine_flags, given_settings
from octavo.engine.arguments.usage import positive
from octavo.engine.client.router_process import RouterProcess
from octavo.engine.client.server_process import ServerProcess

from ..cache_sim.trace import TraceRequest, read_trace
from ..plots.figure import require_matplotlib
from ..plots.route import plot
from .latencies import percentiles

POLICIES = ("cache_aware", "round_robin")
TRACE_PAGE = 512  # tokens of the trace's pages
WORDS = (
    "the", "a", "sea", "boat", "house", "lamp", "night", "day", "friend", "story",
    "little", "old", "big", "went", "said", "had", "was", "and", "to", "of",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    ttft_s: float
    whole_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    max_tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE.jsonl", help="trace, in the format of `octavo replay`")
    add("--workers", type=positive, default=2, metavar="N", help="number of servers behind the router")
    add("--requests", type=positive, default=200, metavar="N", help="number of requests to send")
    add("--page-words", type=positive, default=16, metavar="N",
        help="number of words to send per page of the trace")  # fmt: skip
    add("--concurrency", type=positive, default=8, metavar="N",
        help="maximum number of requests in flight")  # fmt: skip
    add("--runs", type=positive, default=1, metavar="N", help="number of times that each policy is measured")
    add("--plot", type=Path, metavar="F.png", help="image file for a plot of the results (needs "
        "matplotlib)")  # fmt: skip
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    require_matplotlib(args.plot)
    questions = questions_of(read_trace(args.trace)[: args.requests], args.page_words)
    runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    total = len(questions) * len(POLICIES) * args.runs
    with tqdm(total=total, unit="request", disable=None, file=sys.stderr) as bar:
        for _ in range(args.runs):
            for policy in POLICIES:
                runs[policy].append(asyncio.run(_measure(args, policy, questions, bar)))
    result = {
        "bench": "route",
        "workers": args.workers,
        "requests": len(questions),
        "concurrency": args.concurrency,
        "policies": runs,
    }
    _print_table(result)
    if args.plot is not None:
        plot(result, args.plot)
    return result


def questions_of(requests: Sequence[TraceRequest], page_words: int) -> list[Question]:
    """Return a text for each request; texts share beginnings where the requests share pages."""
    return [
        Question(
            " ".join(word for page in request.page_ids for word in _words(page, page_words)),
            max(1, request.output_tokens * page_words // TRACE_PAGE),
        )
        for request in requests
    ]


def _words(page: int, count: int) -> list[str]:
    return [WORDS[index] for index in np.random.default_rng(page).integers(0, len(WORDS), count)]


async def _measure(
    args: argparse.Namespace, policy: str, questions: Sequence[Question], bar: tqdm[Any]
) -> dict[str, Any]:
    flags = engine_flags(given_settings(args))
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(ServerProcess(flags)) for _ in range(args.workers)]
        addresses = [worker.ready["grpc"] for worker in workers]
        router = await stack.enter_async_context(RouterProcess(addresses, policy=policy))
        model = workers[0].ready["model"]
        await router.until_ready([model])
        return await asyncio.to_thread(_send, f"http://{router.listen}", model, args, questions, bar)


def _send(
    url: str, model: str, args: argparse.Namespace, questions: Sequence[Question], bar: tqdm[Any]
) -> dict[str, Any]:
    warmup = [Question(f"{number} " * 16, 4) for number in range(2 * args.workers)]

    def measured(question: Question) -> Answer:
        answer = ask(url, model, question)
        bar.update()
        return answer

    with ThreadPoolExecutor(args.concurrency) as pool:
        list(pool.map(lambda question: ask(url, model, question), warmup))
        began = time.monotonic()
        answers = list(pool.map(measured, questions))
        wall_s = time.monotonic() - began
    output = sum(answer.output_tokens for answer in answers)
    prompts = sum(answer.prompt_tokens for answer in answers)
    return {
        "wall_s": wall_s,
        "prompt_tokens": prompts,
        "hit_ratio": sum(answer.cached_tokens for answer in answers) / prompts,
        "output_tokens_per_s": output / wall_s,
        "total_tokens_per_s": (prompts + output) / wall_s,
        "ttft_s": percentiles([answer.ttft_s for answer in answers]),
        "e2e_s": percentiles([answer.whole_s for answer in answers]),
    }


def ask(url: str, model: str, question: Question) -> Answer:
    """Stream one answer. Raises RequestFailed."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question.text}],
        "max_tokens": question.max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began, first, usage = time.monotonic(), None, None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=600) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                deltas = [choice["delta"] for choice in event["choices"]]
                if first is None and any(delta.get("content") for delta in deltas):
                    first = time.monotonic()
                usage = event.get("usage") or usage
    except urllib.error.HTTPError as error:
        raise RequestFailed(f"the router answered {error.code}: {error.read().decode()}") from None
    except (OSError, ValueError) as error:
        raise RequestFailed(f"the router's answer broke off: {error}") from None
    if usage is None:
        raise RequestFailed("the router's answer ended without its usage; see the log above")
    ended = time.monotonic()
    return Answer(
        ttft_s=(first or ended) - began,
        whole_s=ended - began,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        output_tokens=usage["completion_tokens"],
    )


def _print_table(result: dict[str, Any]) -> None:
    print(
        f"{result['requests']} requests, {result['workers']} workers, {result['concurrency']} at once; "
        "median of the runs and their range"
    )
    print(f"{'':14}{'prompt tokens found':>30}{'first token, p50':>30}{'p95':>30}{'output tokens/s':>30}")
    for policy, runs in result["policies"].items():
        cells = (
            _cell([100 * run["hit_ratio"] for run in runs], "%"),
            *(_cell([1000 * run["ttft_s"][key] for run in runs], "ms") for key in ("p50", "p95")),
            _cell([run["output_tokens_per_s"] for run in runs], ""),
        )
        print(f"{policy:14}" + "".join(f"{cell:>30}" for cell in cells))


def _cell(values: Sequence[float], unit: str) -> str:
    spread = f" ({min(values):.1f}-{max(values):.1f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.1f}{unit and ' '}{unit}{spread}"
