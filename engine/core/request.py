"""A request while it is served: its samples, their output, and their ends."""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

from octavo.scheduler import LatencyGoal, Sequence

from ..api.engine_info import EngineInfo
from ..api.engine_request import EngineRequest
from ..api.errors import InvalidRequest, NotFound
from ..api.image import PromptImage
from ..api.outputs import Delta, FinishReason, PromptLogprobs, TokenLogprob
from ..api.sampling_params import SamplingParams
from ..executor.base import Adapters
from ..executor.sampling.sampler import Sampled, SampleState
from ..speculation.drafting import Drafting
from ..structured_output.compiler import ConstraintCompiler, GrammarDesk
from ..structured_output.reasoning_gate import AnyConstraint, ReasoningMarks
from ..tokenizer.tokenizer import Tokenizer


class Request:
    """A prompt, its sampling parameters, and its ``params.n`` samples.

    ``max_tokens`` limits each sample, earlier output included. Times are in seconds of the engine's clock.
    """

    def __init__(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        tokenizer: Tokenizer,
        vocab_size: int,
        arrived_at: float,
        salt: bytes = b"",
        priority: int = 0,
        tenant: str = "",
        constraint: AnyConstraint | None = None,
        number: int = -1,
        adapter: str | None = None,
        images: tuple[PromptImage, ...] = (),
    ) -> None:
        self.request_id = request_id
        self.adapter = adapter
        self.images = images
        self.number = number
        self.params = params
        self.max_tokens = max_tokens
        self.num_prompt = len(prompt_ids)
        self.num_given = self.num_prompt - params.num_output_tokens
        self.end_ids = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else tokenizer.eos_ids)
        self.arrived_at = arrived_at
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.invalid = False
        self.prompt_ids = prompt_ids
        self.prompt_scores: dict[int, TokenLogprob] = {}  # by position
        self.pooled: Any = 0.0
        self.embedding: tuple[float, ...] | None = None
        seed = secrets.randbits(64) if params.seed is None else params.seed
        bad_ids = tokenizer.ids_of_words(params.bad_words) if params.bad_words else ()
        constraints: list[AnyConstraint | None] = [None] * params.n
        if constraint is not None:
            constraints = list(constraint.copies(params.n))
        self.samples = tuple(
            Sample(
                self,
                index,
                Sequence(
                    f"{request_id}/{index}",
                    list(prompt_ids),
                    max_tokens - params.num_output_tokens,
                    salt=salt,
                    priority=priority,
                    skip_prefix_cache=params.prompt_logprobs is not None or params.pooling == "mean",
                    tenant=tenant,
                    media=tuple(image.span for image in images),
                    latency=LatencyGoal(
                        target_itl=None if params.target_itl is None else params.target_itl / 1e3,
                        first_token_by=None
                        if params.target_ttft is None
                        else arrived_at + params.target_ttft / 1e3,
                    ),
                ),
                SampleState(
                    params,
                    seed=(seed + index) % 2**64,
                    prompt_ids=prompt_ids[: self.num_given],
                    vocab_size=vocab_size,
                    end_ids=self.end_ids,
                    bad_ids=bad_ids,
                    constraint=constraints[index],
                ),
                tokenizer,
            )
            for index in range(params.n)
        )

    @property
    def num_cached(self) -> int:
        return self.samples[0].sequence.history.num_cached or 0

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        if self.params.prompt_logprobs is None:
            return None
        scores = tuple(self.prompt_scores[position] for position in range(1, self.num_prompt))
        return PromptLogprobs(self.prompt_ids[0], scores)

    @property
    def num_generated(self) -> int:
        earlier = self.params.num_output_tokens
        return sum(sample.num_tokens - earlier for sample in self.samples)

    @property
    def finish_reason(self) -> FinishReason | None:
        """The most severe finish reason of the samples; None until all have ended."""
        reasons = {sample.finish_reason for sample in self.samples}
        for reason in (None, FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH):
            if reason in reasons:
                return reason
        return FinishReason.STOP


class Sample:
    """Output of a request: a sequence and its text."""

    def __init__(
        self, request: Request, index: int, sequence: Sequence, state: SampleState, tokenizer: Tokenizer
    ) -> None:
        self.request = request
        self.index = index
        self.sequence = sequence
        self.state = state
        self.num_tokens = 0
        self.last_token_at: float | None = None
        self.finish_reason: FinishReason | None = None
        self.drafting: Drafting | None = None
        self._detokenizer = tokenizer.detokenizer(
            context=sequence.tokens[max(0, request.num_given - 8) : request.num_given],
            shows_special=not request.params.skip_special_tokens,
        )
        self._stops = tokenizer.stop_checker(
            request.params.stop, shows_match=request.params.include_stop_str_in_output
        )
        for token in sequence.tokens[request.num_given :]:
            _, reason, match = self._advance(token)
            if reason is not None:
                raise InvalidRequest(
                    f"num_output_tokens must not reach beyond the output's end, got "
                    f"{request.params.num_output_tokens}, but {reason} ({match!r}) ended it after "
                    f"{self.num_tokens}; the request is complete"
                )

    @property
    def drafts(self) -> tuple[int, ...]:
        return () if self.drafting is None else self.drafting.drafts

    @property
    def tokens_left(self) -> int:
        return self.request.max_tokens - self.num_tokens

    def accept(self, sampled: Sampled) -> Delta:
        token = sampled.token
        if token is None:
            error = sampled.error or "the model's results for this request are not finite numbers"
            return self.fail(error, invalid=sampled.invalid)
        text, reason, match = self._advance(token)
        return self._delta(text, token, sampled.logprob, reason=reason, match=match)

    def _advance(self, token: int) -> tuple[str, FinishReason | None, str | int | None]:
        self.state.record(token)
        self.num_tokens += 1
        reason: FinishReason | None = None
        match: str | int | None
        if token in self.request.end_ids:
            text = self._stops.flush()
            if self.request.params.include_stop_str_in_output:
                text += self._detokenizer.add(token)
            reason, match = FinishReason.STOP, token
        else:
            text = self._detokenizer.add(token)
            if self.num_tokens > self.request.params.min_tokens:
                text = self._stops.add(text + self._stops.marker(token))
            if (match := self._stops.match) is not None:
                reason = FinishReason.STOP
            elif self.state.constraint is not None and self.state.constraint.is_complete:
                text += self._stops.flush()
                reason = FinishReason.STOP
            elif self.num_tokens >= self.request.max_tokens:
                text += self._stops.flush()
                reason = FinishReason.LENGTH
        return text, reason, match

    def fail(self, message: str, *, invalid: bool = False) -> Delta:
        self.request.invalid = self.request.invalid or invalid
        return self._delta(self._stops.flush(), reason=FinishReason.ERROR, error=message)

    def abort(self) -> Delta:
        return self._delta(self._stops.flush(), reason=FinishReason.ABORT)

    def _delta(
        self,
        text: str,
        token: int | None = None,
        logprob: TokenLogprob | None = None,
        *,
        reason: FinishReason | None = None,
        match: str | int | None = None,
        error: str | None = None,
    ) -> Delta:
        self.finish_reason = reason
        delta = Delta(
            request_id=self.request.request_id,
            index=self.index,
            token_ids=() if token is None else (token,),
            text=text,
            logprobs=() if logprob is None else (logprob,),
            finish_reason=reason,
            stop_match=match,
            error=error,
            prompt_tokens=self.request.num_prompt,
            cached_tokens=self.request.num_cached,
        )
        if token is not None and self.num_tokens == self.request.params.num_output_tokens + 1:
            delta.embedding, delta.prompt_logprobs = self.request.embedding, self.request.prompt_logprobs
        return delta


class Update(NamedTuple):
    """New output of a request, as a delta of one sample."""

    request: Request
    delta: Delta


class RequestBuilder:
    """Builder of requests for one model. Thread-safe."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer, adapters: Adapters | None = None) -> None:
        self._adapters = adapters
        self.grammars = GrammarDesk(ConstraintCompiler(tokenizer, vocab_size=info.vocab_size))
        self._info = info
        self._tokenizer = tokenizer
        self._marks: ReasoningMarks | None = None
        if (reasoning := tokenizer.chat_format.reasoning) is not None:
            self._marks = ReasoningMarks(reasoning, tokenizer, vocab_size=info.vocab_size)

    def build(self, request: EngineRequest) -> Request:
        """Return a new request. Raises NotFound if its adapter is not loaded."""
        if request.adapter is not None and (
            self._adapters is None
            or self._adapters.info(request.adapter).variant != request.namespace.variant
        ):
            raise NotFound(
                f"adapter {request.adapter!r} was replaced while the request was read; send the request again"
            )
        return Request(
            request.request_id,
            list(request.prompt_ids),
            request.params,
            max_tokens=request.max_tokens,
            tokenizer=self._tokenizer,
            vocab_size=self._info.vocab_size,
            arrived_at=request.arrived_at,
            salt=request.namespace.page_salt,
            priority=request.priority,
            tenant=request.namespace.tenant,
            constraint=self._constraint(request),
            number=request.number,
            adapter=request.adapter,
            images=request.images,
        )

    def _constraint(self, request: EngineRequest) -> AnyConstraint | None:
        params = request.params
        grammar = None if request.grammar is None else self.grammars.take(request.grammar)
        if self._marks is None or (grammar is None and params.max_reasoning_tokens is None):
            return grammar
        if grammar is not None and params.structured_from_first_token:
            return grammar
        prompt_ids = request.prompt_ids[: request.num_prompt - params.num_output_tokens]
        return self._marks.gate(prompt_ids, grammar, params.max_reasoning_tokens) or grammar
