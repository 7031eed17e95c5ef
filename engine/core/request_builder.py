"""Construction of live requests from the data that the front end sends."""

from __future__ import annotations

from ..api.engine_info import EngineInfo
from ..api.engine_request import EngineRequest
from ..api.errors import NotFound
from ..executor.base import Adapters
from ..structured_output.compiler import ConstraintCompiler
from ..structured_output.grammar_desk import GrammarDesk
from ..structured_output.reasoning_gate import AnyConstraint, ReasoningMarks
from ..tokenizer.tokenizer import Tokenizer
from .request import Request


class RequestBuilder:
    """Builds requests for one model. ``grammars`` compiles their output constraints, and may be used from any
    thread."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer, adapters: Adapters | None = None) -> None:
        self._adapters = adapters
        self.grammars = GrammarDesk(ConstraintCompiler(tokenizer, vocab_size=info.vocab_size))
        self._info = info
        self._tokenizer = tokenizer
        self._marks: ReasoningMarks | None = None
        if (reasoning := tokenizer.chat_format.reasoning) is not None:
            self._marks = ReasoningMarks(reasoning, tokenizer, vocab_size=info.vocab_size)

    def build(self, request: EngineRequest) -> Request:
        """Return the request with the state of its samples. Raises NotFound if its adapter is not loaded."""
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
        """Return the grammar's constraint, which begins after the model's reasoning."""
        params = request.params
        grammar = None if request.grammar is None else self.grammars.take(request.grammar)
        if self._marks is None or (grammar is None and params.max_reasoning_tokens is None):
            return grammar
        if grammar is not None and params.structured_from_first_token:
            return grammar
        return self._marks.gate(request.prompt_ids, grammar, params.max_reasoning_tokens) or grammar
