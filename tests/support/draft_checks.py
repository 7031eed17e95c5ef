from __future__ import annotations

import random
from typing import Any

from octavo.engine.api.config import EngineConfig
from octavo.engine.api.outputs import RequestOutput
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.stats import Observer, StepRecord
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.core.build import build_core
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.core.request import Request
from octavo.engine.executor.load.loader import observe_caches
from octavo.engine.memory.planner import plan

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "colour": {"enum": ["red", "green", "grey"]},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
        "is_round": {"type": "boolean"},
    },
    "required": ["name", "colour", "sizes", "is_round"],
    "additionalProperties": False,
}
FORMS = (
    StructuredOutput(json_schema=SCHEMA),
    StructuredOutput(regex=r"(abc|abd|xyz)( [0-9]{2}, [a-z]+;){2,4}"),
    StructuredOutput(choice=("the same words, always", "the same end", "other")),
    StructuredOutput(grammar='start: "[" pair ("," pair)* "]"\npair: "key" "=" ("one" | "two" pair?)'),
)


class Drafts(Observer):
    """Numbers of accepted and of rejected drafts."""

    def __init__(self) -> None:
        self.num_accepted = 0
        self.num_rejected = 0

    def step(self, record: StepRecord) -> None:
        for num_drafts, num_accepted in record.drafts:
            self.num_accepted += num_accepted
            self.num_rejected += num_drafts - num_accepted

    def rejected(self, reason: str) -> None:
        raise AssertionError(reason)


class Cores:
    def __call__(self, config: EngineConfig, observer: Observer | None = None) -> EngineCore:
        self.core = build_core(config, observer)
        return self.core

    def check(self) -> None:
        assert self.core.drafts.model is not None
        blocks = self.core.drafts.model.blocks
        blocks.check()
        assert blocks.counts.held == 0
        assert not self.core.drafts.draft_states


def random_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Return prompts that repeat a short piece; some share a beginning."""
    shared = [rng.randrange(250) for _ in range(20)]
    prompts = []
    for _ in range(count):
        piece = [rng.randrange(250) for _ in range(rng.randint(3, 12))]
        prompts.append(shared[: rng.choice([0, 9, 20])] + piece * rng.randint(1, 4))
    return prompts


def random_params(rng: random.Random, **changes: Any) -> SamplingParams:
    temperature = rng.choice([0.0, 0.0, 0.3, 1.0])
    return SamplingParams(
        max_tokens=rng.randint(8, 40),
        temperature=temperature,
        top_k=rng.choice([0, 0, 1, 3]),
        top_p=rng.choice([1.0, 0.7]),
        min_p=rng.choice([0.0, 0.2]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.2]),
        logit_bias={rng.randrange(250): rng.choice([3.0, 80.0])} if rng.random() < 0.4 else {},
        seed=rng.randrange(2**32),
        n=rng.choice([1, 1, 1, 2]) if temperature else 1,
        min_tokens=rng.choice([0, 0, 5]),
        stop=("a",) if rng.random() < 0.2 else (),
        logprobs=rng.choice([None, 0, 3]),
        **changes,
    )


def essence(output: RequestOutput) -> object:
    return [(c.text, c.token_ids, c.finish_reason, c.stop_match, c.error, c.logprobs) for c in output.outputs]


def request_of(core: EngineCore, number: int, prompt: list[int], params: SamplingParams) -> Request:
    return Request(
        str(number),
        prompt,
        params,
        max_tokens=params.max_tokens or 16,
        tokenizer=core.tokenizer,
        vocab_size=core.info.vocab_size,
        arrived_at=0.0,
    )


def planned_pages(config: EngineConfig, kv_memory: int) -> int:
    def planned(memory: int) -> dict[str, Any]:
        return plan(
            model=config.model,
            memory=memory,
            page_size=config.page_size,
            formats=[config.page_formats],
            speculate=config.speculate,
            observe=observe_caches,
            residual={"sink_pages": config.sink_pages, "residual_pages": config.residual_pages},
        )

    beside = planned(2**30)
    (row,) = planned(2**30 - beside["kv_bytes"] + kv_memory)["formats"].values()
    return int(row["pages"])


def serve_and_cancel(config: EngineConfig) -> int:
    """Serve random requests and cancel some; return the largest number of pages that the draft model used."""
    rng, cores = random.Random(3), Cores()
    core = cores(config)
    try:
        requests = [
            request_of(core, number, prompt, random_params(rng))
            for number, prompt in enumerate(random_prompts(rng, 30))
        ]
        requests[0] = request_of(
            core, 0, [rng.randrange(250) for _ in range(130)], SamplingParams(max_tokens=20)
        )
        most_held = 0
        waiting = list(requests)
        assert core.drafts.model is not None
        while core.has_work or waiting:
            while waiting and rng.random() < 0.5:
                core.add(waiting.pop(0))
            core.step()
            core.drafts.model.blocks.check()
            most_held = max(most_held, core.drafts.model.blocks.counts.held)
            if rng.random() < 0.2:
                core.abort(rng.choice(requests[1:]))
        cores.check()
        assert core._blocks.counts.held == 0
    finally:
        core.close()
    return most_held
