"""Expected output of the ledger model for a single request, without pages or batches."""

from __future__ import annotations

from dataclasses import dataclass

from fakes import byte_tokenizer
from ledger_runner import chain, next_token
from octavo.engine.api.outputs import Completion, FinishReason
from octavo.engine.api.sampling_params import SamplingParams

TOKENIZER = byte_tokenizer()


@dataclass(frozen=True, slots=True)
class Expected:
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    stop_match: str | int | None

    def matches(self, completion: Completion) -> bool:
        return self == Expected(
            completion.token_ids, completion.text, completion.finish_reason, completion.stop_match
        )


def alone(
    prompt_ids: list[int], params: SamplingParams, *, index: int = 0, ends_every: int = 0, room: int = 10**6
) -> Expected:
    ends = set(params.stop_ids) | (set() if params.ignore_eos else TOKENIZER.eos_ids)
    seed = ((params.seed or 0) + index) % 2**64
    limit = min(room, params.max_tokens or room)
    digest = b""
    for token in prompt_ids:
        digest = chain(digest, token)
    token_ids: list[int] = []
    while True:
        greedy = params.temperature == 0
        token = next_token(digest, None if greedy else (seed, len(token_ids)), ends_every)
        digest = chain(digest, token)
        token_ids.append(token)
        if token in ends:
            return Expected(token_ids, TOKENIZER.decode(token_ids[:-1]), FinishReason.STOP, token)
        text = TOKENIZER.decode(token_ids)
        found = [stop for stop in params.stop if stop in text]
        if found:
            stop = max(found, key=len)  # one token is one character, so all of them end here
            return Expected(token_ids, text[: -len(stop)], FinishReason.STOP, stop)
        if len(token_ids) >= limit:
            return Expected(token_ids, text, FinishReason.LENGTH, None)
