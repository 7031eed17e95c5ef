from __future__ import annotations

import asyncio
import operator
import secrets
import time
from collections.abc import Collection, Mapping, Sequence, Set
from concurrent.futures import Future
from typing import cast

from ..api.engine_request import CacheNamespace, EngineRequest
from ..api.errors import InvalidRequest, NotFound, RequestTooLong
from ..api.image import ImageRules, ImageTensors
from ..api.prompt import ChatPrompt, EncodedPrompt, ImagePrompt, Message, Prompt
from ..api.sampling_params import SamplingParams
from ..api.tenant import NO_TENANT
from ..core.engine_client import EngineClient
from ..vision.messages import has_pictures, num_bytes_of, of_url, pictures_in, set_images, take_pictures
from ..vision.reader import MAX_IMAGES, PictureReader
from ..vision.tensors import images_of, place_tensors
from .text_executor import TextExecutor

MAX_PRIORITY = 1000
LONG_TEXT = 2_000  # characters: encoding longer text takes milliseconds
LONG_PROMPT = 20_000  # token ids: checking a longer prompt takes milliseconds


class InputProcessor:
    def __init__(self, engine: EngineClient, *, cut_max_tokens: bool = False) -> None:
        self._info = info = engine.info
        self._tokenizer = engine.tokenizer
        self._capacity = engine.capacity
        self._cut_max_tokens = cut_max_tokens
        self.grammars = engine.grammars
        self.adapters = {adapter.name: adapter for adapter in info.adapters}
        self._pictures = None if info.images is None else PictureReader(info.images)
        self._has_reasoning = self._tokenizer.chat_format.reasoning is not None

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Encode and validate a prompt. Raises InvalidRequest, or RequestTooLong if the prompt cannot fit the
        model."""
        if isinstance(prompt, EncodedPrompt):
            return prompt
        if isinstance(prompt, ImagePrompt):
            return self._with_given_images(prompt)
        if self._pictures is not None and self._has_pictures(prompt):
            chat = prompt if isinstance(prompt, ChatPrompt) else ChatPrompt(cast(list[Message], prompt))
            return self._with_images(chat, self._pictures)
        ids = self._encode(prompt)
        self.check_ids("prompt", ids)
        return EncodedPrompt(ids)

    def _has_pictures(self, prompt: Prompt) -> bool:
        return self._pictures is not None and has_pictures(_messages_of(prompt))

    def _with_images(self, chat: ChatPrompt, reader: PictureReader) -> EncodedPrompt:
        chat, pictures = take_pictures(chat, max_bytes=reader.limits.max_bytes)
        check_prompt(chat)
        limit, marks = self._info.max_model_len, (reader.rules.mark, reader.rules.text or reader.rules.mark)
        ids = self._tokenizer.apply_chat_template(chat, max_tokens=limit, replaced=marks)
        self.check_ids("prompt", ids)
        images = [
            images_of(each, 1, reader.rules)[0] if isinstance(each, ImageTensors) else reader.read(each)
            for each in pictures
        ]
        return set_images(ids, images, reader.rules)

    def _with_given_images(self, prompt: ImagePrompt) -> EncodedPrompt:
        if (reader := self._pictures) is None:
            raise InvalidRequest("images must be left out, because this model reads only text; send text")
        if len(prompt.urls) > MAX_IMAGES:
            raise InvalidRequest(
                f"a prompt must have at most {MAX_IMAGES} images, got {len(prompt.urls)}; leave some out"
            )
        ids = self._encode(prompt.ids)
        self.check_ids("prompt", ids)
        if prompt.tensors is not None:
            return place_tensors(ids, prompt.tensors, reader.rules)
        files = [of_url(url, reader.limits.max_bytes) for url in prompt.urls]
        return set_images(
            self._framed(ids, reader.rules), [reader.read(file) for file in files], reader.rules
        )

    def _framed(self, ids: list[int], rules: ImageRules) -> list[int]:
        if not rules.text:
            return ids
        if rules.text != rules.text.strip():
            raise InvalidRequest(
                f"images of {self._info.name} must be sent in chats, because they change the tokens around "
                "them; send messages over HTTP or octavo.v1"
            )
        framed = self._tokenizer.encode(rules.text, add_special_tokens=False)
        return [each for token in ids for each in (framed if token == rules.token else (token,))]

    def close(self) -> None:
        if self._pictures is not None:
            self._pictures.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        check_prompt(prompt)
        assert not isinstance(prompt, ImagePrompt | EncodedPrompt)
        limit = self._info.max_model_len
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, max_tokens=limit)
        if isinstance(prompt, ChatPrompt):
            return self._tokenizer.apply_chat_template(prompt, max_tokens=limit)
        if _is_chat(prompt):
            return self._tokenizer.apply_chat_template(cast(list[Message], list(prompt)), max_tokens=limit)
        if len(prompt) >= limit:
            raise _too_long(len(prompt), 1, "model's length is", limit, "")
        try:
            return [operator.index(cast(int, item)) for item in prompt]
        except TypeError as error:
            kinds = sorted({type(item).__name__ for item in prompt})
            raise InvalidRequest(
                f"a prompt must be text, token ids or chat messages, got a list of "
                f"{' and '.join(kinds)}; use one kind"
            ) from error

    def min_tokens(self, prompt: Prompt) -> int:
        """Return a lower bound for the number of tokens, without encoding. Raises InvalidRequest, or
        RequestTooLong for more token ids than the model's length."""
        check_prompt(prompt)
        if isinstance(prompt, str):
            return self._tokenizer.min_tokens(prompt)
        if isinstance(prompt, ChatPrompt):
            return len(prompt.messages)
        count = len(prompt.ids if isinstance(prompt, ImagePrompt | EncodedPrompt) else prompt)
        if not _is_chat(prompt) and count > (limit := self._info.max_model_len):
            raise _too_long(count, 1, "model's length is", limit, "")
        return count

    async def encode_in_thread(
        self, prompt: Prompt, texts: TextExecutor, pictures: TextExecutor
    ) -> EncodedPrompt:
        """Encode a prompt. Long prompts and images use another thread."""
        if isinstance(prompt, EncodedPrompt):
            return prompt
        if isinstance(prompt, ImagePrompt):
            return await pictures.run(NO_TENANT, self.encode, prompt)
        if not _is_chat(prompt):
            assert not isinstance(prompt, ChatPrompt)
            if len(prompt) <= (LONG_TEXT if isinstance(prompt, str) else LONG_PROMPT):
                return self.encode(prompt)
        return await (pictures if self._has_pictures(prompt) else texts).run(NO_TENANT, self.encode, prompt)

    def compile(self, params: SamplingParams) -> int | None:
        return None if params.structured is None else self.grammars.begin(params.structured).result()

    async def compile_in_thread(self, params: SamplingParams, tenant: str) -> int | None:
        if params.structured is None:
            return None
        ticket = self.grammars.begin(params.structured, tenant)
        try:
            return await asyncio.wrap_future(ticket)
        except asyncio.CancelledError:
            ticket.cancel()
            ticket.add_done_callback(self._drop)
            raise

    def _drop(self, ticket: Future[int]) -> None:
        if not ticket.cancelled() and ticket.exception() is None:
            self.grammars.drop(ticket.result())

    def admit(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        salt: bytes = b"",
        priority: int = 0,
        tenant: str = "",
        grammar: int | None = None,
        adapter: str | None = None,
    ) -> EngineRequest:
        """Build a validated request for the queue. Raises InvalidRequest, RequestTooLong or NotFound."""
        if abs(priority) > MAX_PRIORITY:
            raise InvalidRequest(
                f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, got {priority}; 0 is the "
                "default"
            )
        self.check_ids("stop_ids", params.stop_ids)
        self.check_ids("logit_bias", params.logit_bias)
        self.check_ids("allowed_token_ids", params.allowed_token_ids)
        if params.pooling is not None and not self._info.embeds:
            raise InvalidRequest(
                f"{self._info.name} has no embeddings, because its output head was not found at load; "
                "serve another model"
            )
        self._check_something_may_come(params)
        self._check_reasoning(params)
        self._check_images(prompt)
        self._check_earlier_output(prompt, params)
        return EngineRequest(
            request_id=f"request-{secrets.token_hex(8)}" if request_id is None else request_id,
            prompt_ids=prompt.ids,
            images=prompt.images,
            params=params,
            max_tokens=self._max_tokens(len(prompt.ids), params),
            arrived_at=time.monotonic(),
            namespace=CacheNamespace(tenant, salt, self._variant(adapter)),
            priority=priority,
            grammar=grammar,
            adapter=adapter,
        )

    def _variant(self, adapter: str | None) -> bytes:
        if adapter is None:
            return b""
        if adapter not in self.adapters:
            names = ", ".join(self.adapters) or "none"
            raise NotFound(
                f"adapter must be a loaded one ({names:.500}), got {adapter!r:.100}; load it first"
            )
        return self.adapters[adapter].variant

    def _check_images(self, prompt: EncodedPrompt) -> None:
        if (rules := self._info.images) is None:
            return
        count, wanted = prompt.ids.count(rules.token), sum(image.num_rows for image in prompt.images)
        if count != wanted:
            raise InvalidRequest(
                f"a prompt must have a placeholder ({rules.mark}, id {rules.token}) for each row of its "
                f"images, got {count} for {wanted} rows; send images in chats, and leave placeholders out of "
                "texts and token ids"
            )

    def _check_earlier_output(self, prompt: EncodedPrompt, params: SamplingParams) -> None:
        if not (earlier := params.num_output_tokens):
            return
        if earlier >= len(prompt.ids):
            raise InvalidRequest(
                f"num_output_tokens must be less than the number of prompt tokens ({len(prompt.ids)}), got "
                f"{earlier}; send the whole prompt, followed by the output so far"
            )
        ends = set(params.stop_ids) | (set() if params.ignore_eos else self._tokenizer.eos_ids)
        if ended := ends.intersection(prompt.ids[-earlier:]):
            raise InvalidRequest(
                f"earlier output must not have an end token, got {min(ended)}; the request is complete"
            )

    def _check_reasoning(self, params: SamplingParams) -> None:
        if params.max_reasoning_tokens is not None and not self._has_reasoning:
            raise InvalidRequest(
                f"max_reasoning_tokens is {params.max_reasoning_tokens}, but {self._info.name} has no "
                "reasoning parser; leave it out, or start the engine with --reasoning-parser"
            )

    def check_ids(self, name: str, token_ids: Sequence[int] | Mapping[int, float]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._info.vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < self._info.vocab_size)
            raise InvalidRequest(
                f"{name} must have token ids in [0, {self._info.vocab_size}), got {wrong}; use this "
                "model's tokenizer"
            )

    def _check_something_may_come(self, params: SamplingParams) -> None:
        if not params.min_tokens or params.structured is not None:
            return
        size = self._info.vocab_size
        held = {token for token in self._tokenizer.eos_ids if token < size and not params.ignore_eos}
        if len(held.union(params.stop_ids)) >= size:
            raise InvalidRequest(
                f"min_tokens is {params.min_tokens}, but stop_ids has all {size} tokens of this model, so "
                "any first token would end the output; leave out one of the two"
            )

    def _max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        if not num_prompt:
            raise InvalidRequest("the prompt is empty; give at least one token")
        room, asked, earlier = self._capacity, params.max_tokens, params.num_output_tokens
        least = 1 if self._cut_max_tokens or asked is None else asked - earlier
        for limit, what, remedy in (
            (self._info.max_model_len, "model's length is", ""),
            (room, "page pool holds", ", or start the engine with a larger pool"),
        ):
            if num_prompt + least > limit:
                raise _too_long(num_prompt, least, what, limit, remedy)
        fits = min(self._info.max_model_len, room) - num_prompt + earlier
        return min(asked or fits, fits)


def check_prompt(prompt: object) -> None:
    if isinstance(prompt, ChatPrompt | ImagePrompt | EncodedPrompt):
        return
    if not isinstance(prompt, Collection) or isinstance(prompt, bytes | Mapping | Set):
        raise InvalidRequest(
            f"a prompt must be text, a list of token ids or a list of chat messages, got {prompt!r:.60}; "
            "convert it"
        )


def check_params(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(
            f"params must be SamplingParams, got {params!r:.60}; write SamplingParams(max_tokens=32)"
        )


def file_bytes(prompt: Prompt) -> int:
    """Return the bytes of the image files and data: URLs in a prompt."""
    if isinstance(prompt, ImagePrompt):
        return sum(map(len, prompt.urls)) + (
            0 if prompt.tensors is None else len(prompt.tensors.pixels.values)
        )
    if not isinstance(prompt, ChatPrompt | list | tuple):
        return 0
    return sum(map(num_bytes_of, pictures_in(_messages_of(prompt))))


def _messages_of(prompt: Prompt) -> Sequence[Message]:
    if isinstance(prompt, ChatPrompt):
        return prompt.messages
    return cast(list[Message], prompt) if _is_chat(prompt) else ()


def _is_chat(prompt: Prompt) -> bool:
    if isinstance(prompt, ChatPrompt):
        return True
    if isinstance(prompt, str | ImagePrompt | EncodedPrompt):
        return False
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _too_long(num_prompt: int, num_output: int, what: str, limit: int, remedy: str) -> RequestTooLong:
    return RequestTooLong(
        f"a prompt of {num_prompt} tokens and max_tokens {num_output} need {num_prompt + num_output} "
        f"positions, but the {what} {limit}; shorten the prompt or lower max_tokens{remedy}"
    )
