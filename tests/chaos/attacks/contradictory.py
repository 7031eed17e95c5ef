"""Parameters that contradict each other or have a wrong type."""

from __future__ import annotations

import json

from octavo.proto import generation_pb2 as pb

from ..attack import Attack, Seen, Target, count, request_of

ROUNDS = 10
VOCABULARY = 1536


def requests() -> list[pb.GenerateRequest]:
    tag = {"type": "structural_tag", "triggers": ["<f"], "structures": [{"begin": 1, "schema": {}, "end": 2}]}
    named = request_of(max_tokens=2)
    named.request_id = "a line\nand another: error"
    return [
        request_of(max_tokens=4, repetition_penalty=1e-39),
        request_of(max_tokens=4, min_tokens=4, stop_ids=range(VOCABULARY)),
        request_of(max_tokens=4, logit_bias=dict.fromkeys(range(VOCABULARY), -1e30)),
        request_of(max_tokens=4, temperature=1e-30, logit_bias={5: 1e30}),
        request_of(max_tokens=4, structured=pb.Structured(structural_tag=json.dumps(tag))),
        request_of(max_tokens=4, structured=pb.Structured(structural_tag="[]")),
        request_of(max_tokens=4, structured=pb.Structured(json_schema='{"type": 7}')),
        named,
    ]


async def attack(target: Target, seen: Seen) -> None:
    async with target.generation() as stub:
        for _ in range(ROUNDS):
            for request in requests():
                await count(seen, stub.Generate(request, metadata=target.metadata, timeout=20))


ATTACK = Attack(name="contradictory", finding="E2, E5", run=attack)
