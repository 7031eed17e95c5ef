"""What ``octavo generate`` was answered: printed as it comes, summed up, and as JSON."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ..api.outputs import Delta, FinishReason, PromptLogprobs, TokenLogprob


@dataclass(slots=True)
class Sample:
    """What has come of one sample."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None


class Answer:
    """Collects the samples and prints a single one as it comes; several are printed at the end,
    since they would be mixed."""

    def __init__(self, num_samples: int) -> None:
        self.samples = [Sample() for _ in range(num_samples)]
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._prompt_logprobs: PromptLogprobs | None = None
        self._began = self._last = time.monotonic()
        self._first: float | None = None
        self._num_first = 0  # tokens that came with the first delta

    def add(self, delta: Delta) -> None:
        self._last = time.monotonic()
        if delta.token_ids and self._first is None:
            self._first, self._num_first = self._last, len(delta.token_ids)
        sample = self.samples[delta.index]
        sample.text += delta.text
        sample.token_ids += delta.token_ids
        sample.logprobs += delta.logprobs
        sample.finish_reason = delta.finish_reason
        sample.error = delta.error
        self.prompt_tokens, self.cached_tokens = delta.prompt_tokens, delta.cached_tokens
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        if len(self.samples) == 1:
            print(delta.text, end="", flush=True)

    def print_rest(self) -> None:
        """End the streamed text's line, or print all samples."""
        if len(self.samples) == 1:
            print(flush=True)
            return
        for index, sample in enumerate(self.samples):
            print(f"[{index}] {sample.text}", flush=True)

    @property
    def num_generated(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def ttft_s(self) -> float:
        return (self._last if self._first is None else self._first) - self._began

    @property
    def tokens_per_s(self) -> float:
        """Rate after the first tokens; of the whole when there are no others."""
        if self._first is not None and self._last > self._first:
            return (self.num_generated - self._num_first) / (self._last - self._first)
        return self.num_generated / max(self._last - self._began, 1e-9)

    def summary(self) -> str:
        reasons = ", ".join(str(sample.finish_reason) for sample in self.samples)
        return (
            f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), "
            f"{self.num_generated} generated, "
            f"first after {self.ttft_s:.3f} s, then {self.tokens_per_s:.1f}/s; finished by {reasons}"
        )

    def as_json(self) -> dict[str, Any]:
        found = {
            "outputs": [_sample_json(index, sample) for index, sample in enumerate(self.samples)],
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "ttft_s": self.ttft_s,
            "tokens_per_s": self.tokens_per_s,
        }
        if self._prompt_logprobs is not None:
            found["prompt_logprobs"] = [
                {"token_id": self._prompt_logprobs.first_id, "logprob": None, "top": []},
                *map(_logprob_json, self._prompt_logprobs.rest),
            ]
        return found


def _sample_json(index: int, sample: Sample) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": index,
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
