from __future__ import annotations

from .outputs import Completion, Delta, PromptLogprobs, TokenLogprob

_DELTA_BYTES = 200  # bytes of an empty delta in CPython
_NUMBER_BYTES = 32
_TOKEN_BYTES = 40
_LOGPROB_BYTES = 160


class OutputCollector:
    """Merges output deltas of one sample, in order. ``num_bytes`` estimates their memory."""

    __slots__ = (
        "_embedding",
        "_last",
        "_logprobs",
        "_only",
        "_prompt_logprobs",
        "_texts",
        "_token_ids",
        "num_bytes",
    )

    def __init__(self) -> None:
        self.num_bytes = 0
        self._only: Delta | None = None
        self._last: Delta | None = None
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: PromptLogprobs | None = None
        self._embedding: tuple[float, ...] | None = None

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
        taken = only or Delta(
            request_id=last.request_id,
            index=last.index,
            token_ids=tuple(self._token_ids),
            text="".join(self._texts),
            logprobs=tuple(self._logprobs),
            finish_reason=last.finish_reason,
            stop_match=last.stop_match,
            error=last.error,
            prompt_tokens=last.prompt_tokens,
            cached_tokens=last.cached_tokens,
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
