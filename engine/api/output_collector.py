from __future__ import annotations

from dataclasses import dataclass, field, replace

from .outputs import Completion, Delta, PromptLogprobs, TokenLogprob

_DELTA_BYTES = 200  # bytes of an empty delta in CPython
_NUMBER_BYTES = 32
_TOKEN_BYTES = 40
_LOGPROB_BYTES = 160


@dataclass(slots=True, eq=False)
class OutputCollector:
    """Merges output deltas of one sample, in order. ``num_bytes`` estimates their memory."""

    num_bytes: int = field(default=0, init=False)
    _only: Delta | None = field(default=None, init=False)
    _last: Delta | None = field(default=None, init=False)
    _token_ids: list[int] = field(default_factory=list, init=False)
    _texts: list[str] = field(default_factory=list, init=False)
    _logprobs: list[TokenLogprob] = field(default_factory=list, init=False)
    _prompt_logprobs: PromptLogprobs | None = field(default=None, init=False)
    _embedding: tuple[float, ...] | None = field(default=None, init=False)

    @property
    def is_empty(self) -> bool:
        return self._last is None

    @property
    def is_finished(self) -> bool:
        return self._last is not None and self._last.finish_reason is not None

    def add(self, delta: Delta, *, counts_prompt: bool = True) -> None:
        last = self._last
        assert last is None or last.finish_reason is None, f"{delta.request_id} got output after its end"
        self.num_bytes += delta_bytes(delta, counts_prompt=counts_prompt)
        self._last = delta
        if last is None:
            self._only = delta
            return
        if self._only is not None:
            self._append(self._only)
            self._only = None
        self._append(delta)

    def _append(self, delta: Delta) -> None:
        self._token_ids += delta.token_ids
        self._texts.append(delta.text)
        self._logprobs += delta.logprobs
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        self._embedding = self._embedding or delta.embedding

    def take(self) -> Delta:
        """Return the collected deltas as one delta, and clear the collector."""
        last, only = self._last, self._only
        assert last is not None, "no output was collected"
        taken = only or replace(
            last,
            token_ids=tuple(self._token_ids),
            text="".join(self._texts),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            embedding=self._embedding,
        )
        self.__init__()  # type: ignore[misc]
        return taken


def completion_of(delta: Delta) -> Completion:
    return Completion(
        index=delta.index,
        text=delta.text,
        token_ids=list(delta.token_ids),
        finish_reason=delta.finish_reason,
        stop_match=delta.stop_match,
        error=delta.error,
        logprobs=list(delta.logprobs),
    )


def delta_bytes(delta: Delta, *, counts_prompt: bool = True) -> int:
    """Return the estimated memory of a delta in bytes."""
    size = _DELTA_BYTES + _TOKEN_BYTES * len(delta.token_ids) + len(delta.text)
    if delta.logprobs:
        size += logprobs_bytes(delta.logprobs)
    if counts_prompt and delta.prompt_logprobs is not None:
        size += logprobs_bytes(delta.prompt_logprobs.rest)
    if delta.embedding is not None:
        size += _NUMBER_BYTES * len(delta.embedding)
    return size


def prompt_logprobs_bytes(num_prompt: int, num_alternatives: int) -> int:
    return _LOGPROB_BYTES * num_prompt * (1 + num_alternatives)


def logprobs_bytes(entries: tuple[TokenLogprob, ...]) -> int:
    return _LOGPROB_BYTES * len(entries) * (1 + len(entries[0].top)) if entries else 0
