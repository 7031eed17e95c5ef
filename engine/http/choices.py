"""Answers of the OpenAI API with one choice per sample, written at once or as a stream of chunks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar

from ..api.outputs import Delta
from ..api.prompt import Prompt
from ..api.sampling_params import SamplingParams
from .endpoint import Services
from .exchange import Exchange, json_list, json_of
from .generation import Usage, new_id, run
from .sampling import SamplingFields


class ChoicesAnswer(ABC):
    """An answer to one request.

    prefix          beginning of the id
    kinds           ``object`` of a whole answer and of a chunk
    fields, parts   more fields of the next written object; ``parts`` are JSON for fields that are null
    without_output  show no output, because only the prompt was asked for
    """

    prefix: ClassVar[str]
    kinds: ClassVar[tuple[str, str]]

    def __init__(
        self,
        services: Services,
        exchange: Exchange,
        request: SamplingFields,
        params: SamplingParams,
        name: str,
    ) -> None:
        self.services, self.params = services, params
        self.fields: dict[str, Any] = {}
        self.parts: dict[str, bytes] = {}
        self.without_output = False
        self._exchange, self.request = exchange, request
        self._head: dict[str, Any] = {
            "id": new_id(self.prefix, exchange.request_id),
            "object": self.kinds[bool(request.stream)],
            "created": int(time.time()),
            "model": name,
            "choices": [],
        }
        self._usage = Usage()
        exchange.request_id = exchange.request_id or self._head["id"]

    async def write(self, prompts: Sequence[Prompt]) -> None:
        """Generate the samples of all prompts and send them."""
        exchange, services = self._exchange, self.services
        async with aclosing(self._choices(prompts)) as choices:
            if self.request.stream:
                await self._stream(choices)
                return
            with services.answers.hold(services.handler.tenant(exchange)) as take:
                found: dict[int, bytes] = {}
                async for index, choice in choices:
                    take(len(choice))
                    found[index] = choice
                await exchange.answer_bytes(self._written([found[at] for at in sorted(found)], is_last=True))

    async def _stream(self, choices: AsyncGenerator[tuple[int, bytes], None]) -> None:
        exchange = self._exchange
        async for _, choice in choices:
            if not exchange.is_started:
                await exchange.start_events()
            if choice:
                await exchange.event(self._written([choice]))
        if self._shows_usage:
            await exchange.event(self._written([], is_last=True))
        await exchange.end_events()

    async def _choices(self, prompts: Sequence[Prompt]) -> AsyncGenerator[tuple[int, bytes], None]:
        deltas = run(self.services, self._exchange, self.request, prompts, self.params)
        async with aclosing(deltas):
            async for prompt, delta in deltas:
                if self.without_output:
                    delta.token_ids, delta.text, delta.logprobs = (), "", ()
                self._usage.add(prompt, delta)
                index = prompt * self.params.n + delta.index
                write = partial(self.choice, prompt, index, delta)
                yield index, await self.services.handler.message_of(delta, write)

    @abstractmethod
    def choice(self, prompt: int, index: int, delta: Delta) -> bytes:
        """Return a choice as JSON; b"" if a stream has nothing to send."""

    def is_sent(self, delta: Delta, shown: object) -> bool:
        has_ids = bool(self.request.return_token_ids and delta.token_ids)
        return bool(shown or has_ids or delta.logprobs or delta.finish_reason is not None)

    def finish(self, delta: Delta) -> dict[str, Any]:
        if delta.finish_reason is None:
            return {"finish_reason": None}
        if self.without_output:
            return {"finish_reason": "length", "stop_reason": None}
        reason = self.services.stop_reason(delta, self.params)
        return {"finish_reason": delta.finish_reason.value, "stop_reason": reason}

    @property
    def _shows_usage(self) -> bool:
        options = self.request.stream_options
        return options is not None and bool(options.include_usage)

    def _written(self, choices: Sequence[bytes], *, is_last: bool = False) -> bytes:
        options = self.request.stream_options
        answer = dict(self._head)
        if is_last or (options is not None and options.continuous_usage_stats):
            answer["usage"] = self._usage.info()
        elif self._shows_usage:
            answer["usage"] = None
        answer, self.fields = answer | self.fields, {}
        return json_of(answer, **self.parts, choices=json_list(choices))
