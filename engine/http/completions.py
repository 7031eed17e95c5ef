"""/v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ..api.errors import InvalidRequest
from ..api.outputs import Delta
from ..api.prompt import Prompt
from ..api.sampling_params import SamplingParams
from ..api.tenant import NO_TENANT
from .choices import ChoicesAnswer
from .endpoint import Services
from .errors import FieldError
from .exchange import Exchange, json_of
from .generation import MAX_PROMPTS
from .logprobs import CompletionLogprobWriter, prompt_entries, shown_logprobs
from .prompts import prompt_cut
from .request_model import only
from .sampling import SamplingFields

DEFAULT_MAX_TOKENS = 16  # the OpenAI API's default
_LOGPROB_BYTES = 20
PromptField = str | list[int] | list[str] | list[list[int]]


class CompletionRequest(SamplingFields):
    prompt: PromptField
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    def check_served(self) -> None:
        super().check_served()
        only("suffix", self.suffix, (), "insertion before a suffix is not supported")


async def serve_completions(services: Services, request: CompletionRequest, exchange: Exchange) -> None:
    name = services.check_model(request.model, exchange)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    cut = prompt_cut(services, request, max_tokens=max_tokens)
    prompts = [
        await cut.encoded(services, exchange, prompt) for prompt in prompts_of("prompt", request.prompt)
    ]
    asked_logprobs = request.prompt_logprobs
    if request.stream:
        only("prompt_logprobs", asked_logprobs, (), "a stream has none")
    await _check_json_object(services, request, prompts)
    if request.echo and request.logprobs is not None:
        asked_logprobs = max(request.logprobs, asked_logprobs or 0)
    without_output = bool(request.echo) and max_tokens == 0
    params = request.model_copy(update={"prompt_logprobs": asked_logprobs}).sampling(
        services.files.sampling,
        max_tokens=1 if without_output else max_tokens,
        logprobs=None if without_output else request.logprobs,
        structured=None if without_output else request.structured(),
    )
    answer = _Answer(services, exchange, request, params, name)
    answer.without_output = without_output
    if request.echo or request.return_token_ids:
        answer.prompt_ids = [await services.handler.engine.encode(prompt) for prompt in prompts]
        answer.texts = [await _text_of(services, prompt) for prompt in prompts]
        prompts = list(answer.prompt_ids)
    if request.echo and asked_logprobs is not None:
        num_prompt = sum(map(len, answer.prompt_ids))
        services.answers.check(params.n * num_prompt * (1 + asked_logprobs) * _LOGPROB_BYTES)
    await answer.write(prompts)


def prompts_of(name: str, given: PromptField) -> list[Prompt]:
    """Return the prompts of a field. Raises FieldError if there are none or too many."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [cast(Prompt, given)]
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise FieldError(
            name,
            f"{name} must have between 1 and {MAX_PROMPTS} items, got {len(given)}; send several requests",
        )
    return list(cast(Sequence[Prompt], given))


async def _check_json_object(services: Services, request: CompletionRequest, prompts: list[Prompt]) -> None:
    if request.response_format is None or request.response_format.type != "json_object":
        return
    for prompt in prompts:
        if "json" not in (await _text_of(services, prompt)).lower():
            raise FieldError(
                "response_format",
                'response_format json_object must come with prompts that contain the word "JSON", got '
                f"{prompt!r:.60}; ask for JSON in the prompt, or give a json_schema",
            )


async def _text_of(services: Services, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    ids = cast(Sequence[int], prompt)
    return await services.handler.texts.run(NO_TENANT, services.handler.engine.tokenizer.decode, ids)


class _Answer(ChoicesAnswer):
    prefix, kinds = "cmpl", ("text_completion", "text_completion")
    request: CompletionRequest

    def __init__(
        self,
        services: Services,
        exchange: Exchange,
        request: CompletionRequest,
        params: SamplingParams,
        name: str,
    ) -> None:
        super().__init__(services, exchange, request, params, name)
        self.prompt_ids: list[list[int]] = []
        self.texts: list[str] = []
        self._writers: dict[int, CompletionLogprobWriter] = {}
        self._begun: set[int] = set()

    def choice(self, prompt: int, index: int, delta: Delta) -> bytes:
        request = self.request
        is_first = index not in self._begun
        echoes = bool(request.echo) and is_first
        if request.stream and not self.is_sent(delta, echoes or delta.text):
            return b""
        self._begun.add(index)
        text = self.texts[prompt] + delta.text if echoes else delta.text
        fields: dict[str, Any] = {"index": index, "text": text, "logprobs": None} | self.finish(delta)
        if request.logprobs is not None:
            fields["logprobs"] = self._logprobs(index, delta, echoes=echoes)
        if request.return_token_ids:
            fields["token_ids"] = list(delta.token_ids)
            fields["prompt_token_ids"] = self.prompt_ids[prompt] if is_first else None
        entries: bytes | None = None
        if request.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            fields["prompt_logprobs"] = None
            entries = prompt_entries(delta.prompt_logprobs, self.services.texts)
        return json_of(fields, prompt_logprobs=entries)

    def _logprobs(self, index: int, delta: Delta, *, echoes: bool) -> Any:
        request = self.request
        writer = self._writers.get(index)
        if writer is None:
            assert request.logprobs is not None
            as_ids = bool(request.return_tokens_as_token_ids)
            writer = CompletionLogprobWriter(self.services.texts, request.logprobs, as_ids=as_ids)
            self._writers[index] = writer
        if echoes and delta.prompt_logprobs is None:
            raise InvalidRequest(
                "the prompt's log probabilities are missing from the output; send the request again"
            )
        prompt = delta.prompt_logprobs if echoes else None
        return writer.write(shown_logprobs(delta, self.params), prompt)
