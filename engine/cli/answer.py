from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from ..api.output_collector import OutputCollector, completion_of
from ..api.outputs import Completion, Delta, PromptLogprobs, TokenLogprob
from ..api.stats import DraftRecord, StepRecord
from ..client.token_times import TokenTimes


class Drafts:
    def __init__(self) -> None:
        self._records: list[DraftRecord] = []

    def step(self, record: StepRecord) -> None:
        self._records += record.drafts

    def rejected(self, reason: str) -> None: ...

    def as_json(self) -> dict[str, Any]:
        accepted = sum(record.num_accepted for record in self._records)
        return {
            "drafted": sum(record.num_drafts for record in self._records),
            "accepted": accepted,
            "mean_accepted_length": 1 + accepted / max(len(self._records), 1),
        }


class Answer:
    def __init__(
        self,
        num_samples: int,
        drafts: Drafts | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafts = drafts
        self._clock = clock
        self.times = TokenTimes(clock())
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._collectors = [OutputCollector() for _ in range(num_samples)]
        self._prompt_logprobs: PromptLogprobs | None = None

    def add(self, delta: Delta) -> None:
        self.times.add(self._clock(), len(delta.token_ids), delta.index)
        self._collectors[delta.index].add(delta)
        self.prompt_tokens, self.cached_tokens = delta.prompt_tokens, delta.cached_tokens
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        if len(self._collectors) == 1:
            print(delta.text, end="", flush=True)

    def print_rest(self) -> None:
        if len(self.samples) == 1:
            print(flush=True)
            return
        for sample in self.samples:
            print(f"[{sample.index}] {sample.text}", flush=True)

    @functools.cached_property
    def samples(self) -> list[Completion]:
        return [
            Completion(index=index) if collector.is_empty else completion_of(collector.take())
            for index, collector in enumerate(self._collectors)
        ]

    def summary(self) -> str:
        times, later = self.times, self.times.later_per_s
        rate = f"{times.per_s:.1f} tokens/s in total" if later is None else f"then {later:.1f} tokens/s"
        reasons = ", ".join(str(sample.finish_reason) for sample in self.samples)
        return (
            f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), {times.num_tokens} "
            f"generated, first token after {times.ttft_s:.3f} s, {rate}; finish reason {reasons}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the answer as JSON."""
        later = self.times.later_per_s
        found = {
            "outputs": [_sample_json(sample) for sample in self.samples],
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "ttft_s": self.times.ttft_s,
            "tokens_per_s": self.times.per_s if later is None else later,
        }
        if self._drafts is not None:
            found["speculation"] = self._drafts.as_json()
        if self._prompt_logprobs is not None:
            found["prompt_logprobs"] = [
                {"token_id": self._prompt_logprobs.first_id, "logprob": None, "top": []},
                *map(_logprob_json, self._prompt_logprobs.rest),
            ]
        return found


def _sample_json(sample: Completion) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": sample.index,
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
    }
    if sample.logprobs:
        found["logprobs"] = [_logprob_json(entry) for entry in sample.logprobs]
    return found


def _logprob_json(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "logprob": entry.logprob,
        "top": [{"token_id": token, "logprob": logprob} for token, logprob in entry.top],
    }
