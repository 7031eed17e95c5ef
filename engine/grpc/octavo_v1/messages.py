from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

import octavo
from octavo.proto import generation_pb2 as pb

from ...api.engine_info import AdapterInfo, EngineInfo
from ...api.errors import InvalidRequest, RequestFailed
from ...api.image import ImageTensors, Tensor
from ...api.outputs import Delta, FinishReason, PromptLogprobs, TokenLogprob
from ...api.prompt import ChatPrompt, Prompt, check_variables
from ...api.sampling_params import SamplingParams
from ...api.stats import Gauges
from ...chat.tool_choice import tool_use
from ..packed_ids import ids_of
from ..sampling_fields import SamplingFields, structured_message, structured_of
from ..status import Context, status_of

if TYPE_CHECKING:
    from ...tokenizer.tokenizer import Tokenizer

_FIELDS = SamplingFields(pb.SamplingParams.DESCRIPTOR)
_FINISH = {reason: getattr(pb, f"FINISH_REASON_{reason.name}") for reason in FinishReason}
_FINISH_BACK = {number: reason for reason, number in _FINISH.items()}


def chat_prompt(chat: pb.Chat) -> ChatPrompt:
    """Convert a chat message. Raises InvalidRequest."""
    if not chat.messages:
        raise InvalidRequest("chat has no messages; give at least one")
    for i, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequest(f'chat message {i} has no role; set it to "user", "system" or "assistant"')
    variables = _object("chat.template_variables", chat.template_variables or "{}")
    check_variables("chat.template_variables", variables)
    return ChatPrompt(
        [_message_of(index, message) for index, message in enumerate(chat.messages)],
        tools=[_object(f"chat.tools[{index}]", tool) for index, tool in enumerate(chat.tools)] or None,
        variables=variables,
    )


def _message_of(index: int, message: pb.ChatMessage) -> dict[str, Any]:
    where = f"chat message {index}"
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        if message.content:
            raise InvalidRequest(f"{where} has both content and parts; set one of them")
        kinds = [part.WhichOneof("part") for part in message.parts]
        if None in kinds:
            raise InvalidRequest(f"{where} has an empty part; set text, image, image_url or pixel_values")
        if kinds.count("text") == len(kinds):
            found["content"] = "".join(part.text for part in message.parts)
        else:
            found["content"] = [_part_of(part) for part in message.parts]
    if message.tool_calls:
        found["tool_calls"] = [_object(f"a tool call of {where}", call) for call in message.tool_calls]
    for name in ("tool_call_id", "reasoning_content"):
        if value := getattr(message, name):
            found[name] = value
    return found


def _part_of(part: pb.ContentPart) -> dict[str, Any]:
    kind = part.WhichOneof("part")
    assert kind is not None, "empty parts are refused"
    if kind != "pixel_values":
        return {"type": kind, kind: getattr(part, kind)}
    given = part.pixel_values
    grid = Tensor(np.array([given.grid], "<u4").tobytes(), (1, len(given.grid)), "uint32")
    pixels = Tensor(given.values, tuple(given.shape), given.dtype)
    return {"type": "image", "image": ImageTensors(pixels, grid if given.grid else None)}


def _object(where: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(
            f"{where} must be a JSON object, got {text!r:.60} ({error}); correct it"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be a JSON object, got {text!r:.60}; correct it")
    return value


def with_tools(
    request: pb.GenerateRequest, prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer
) -> tuple[Prompt, SamplingParams]:
    """Add the chat's tools to the prompt and to the sampling parameters. Raises InvalidRequest."""
    if not isinstance(prompt, ChatPrompt) or not (prompt.tools or request.chat.tool_choice):
        return prompt, params
    choice: str | dict[str, Any] = request.chat.tool_choice or "auto"
    if choice not in ("auto", "none", "required"):
        choice = {"type": "function", "function": {"name": choice}}
    use = tool_use(tokenizer, prompt.tools, choice, params)
    return replace(prompt, tools=use.shown or None), use.applied(params)


def prompt_of(request: pb.GenerateRequest | pb.EmbedRequest) -> Prompt:
    """Return the prompt of a request. Raises InvalidRequest."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return ids_of(request.token_ids, request.token_ids.ids)
        case "chat":
            if isinstance(request, pb.EmbedRequest) and request.chat.tool_choice:
                raise InvalidRequest("chat.tool_choice is supported only by Generate; leave it out")
            return chat_prompt(request.chat)
        case _:
            raise InvalidRequest("the request has no prompt; set one of text, token_ids and chat")


def asked_of(
    request: pb.GenerateRequest | pb.EmbedRequest | pb.RerankRequest, context: Context
) -> dict[str, Any]:
    return {
        "context": context,
        "request_id": "" if isinstance(request, pb.RerankRequest) else request.request_id,
        "cache_salt": request.cache_salt,
        "priority": request.priority,
        "adapter": request.adapter or None,
    }


def params_of(sampling: pb.SamplingParams) -> SamplingParams:
    """Convert a message to sampling parameters. Unset fields keep their defaults."""
    structured = None
    if sampling.HasField("structured"):
        kind = sampling.structured.WhichOneof("constraint")
        structured = structured_of(kind, getattr(sampling.structured, kind) if kind else None)
        if structured is None:
            raise InvalidRequest(
                "structured must have one field set, got none; set one, or leave structured out"
            )
    return SamplingParams(**_FIELDS.read(sampling), structured=structured)


def params_message(params: SamplingParams) -> pb.SamplingParams:
    structured = None if params.structured is None else structured_message(params.structured)
    return pb.SamplingParams(**_FIELDS.write(params), structured=structured)


def is_final_only(request: pb.GenerateRequest) -> bool:
    """Whether the client wants one response per sample. Raises InvalidRequest for an unknown mode."""
    mode = request.output_mode
    if mode not in pb.OutputMode.values():
        known = ", ".join(pb.OutputMode.keys())
        raise InvalidRequest(f"output_mode {mode} is unknown; use one of {known}")
    return mode == pb.OUTPUT_MODE_FINAL


class Responses:
    def __init__(self) -> None:
        self._num_generated: Counter[int] = Counter()
        self._prompt: pb.GenerateResponse | None = None

    def of(self, delta: Delta) -> pb.GenerateResponse:
        response = pb.GenerateResponse()
        response.request_id = delta.request_id
        response.index = delta.index
        response.token_ids.extend(delta.token_ids)
        response.text = delta.text
        usage = response.usage
        usage.prompt_tokens = delta.prompt_tokens
        usage.cached_tokens = delta.cached_tokens
        self._num_generated[delta.index] += len(delta.token_ids)
        usage.generated_tokens = self._num_generated[delta.index]
        if delta.logprobs:
            response.logprobs.extend(pb.TokenLogprob(**_logprob_fields(each)) for each in delta.logprobs)
        if delta.prompt_logprobs is not None:
            if self._prompt is None:
                self._prompt = pb.GenerateResponse()
                self._prompt.prompt_logprobs.add(token_id=delta.prompt_logprobs.first_id)
                self._prompt.prompt_logprobs.extend(
                    pb.PromptLogprob(**_logprob_fields(each)) for each in delta.prompt_logprobs.rest
                )
            response.MergeFrom(self._prompt)
        if delta.finish_reason is not None:
            response.finish_reason = _FINISH[delta.finish_reason]
        if isinstance(delta.stop_match, str):
            response.stop_string = delta.stop_match
        elif delta.stop_match is not None:
            response.stop_id = delta.stop_match
        if delta.error is not None:
            response.error.CopyFrom(error_message(RequestFailed(delta.error)))
        return response


def error_message(error: Exception) -> pb.Error:
    status = status_of(error)
    return pb.Error(code=status.code, message=status.message)


def delta_of(response: pb.GenerateResponse) -> Delta:
    logprobs, prompt_logprobs, usage = response.logprobs, response.prompt_logprobs, response.usage
    delta = Delta(
        request_id=response.request_id,
        index=response.index,
        token_ids=tuple(response.token_ids),
        text=response.text,
        logprobs=tuple(map(_logprob_of, logprobs)) if logprobs else (),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        prompt_logprobs=_prompt_logprobs_of(prompt_logprobs) if prompt_logprobs else None,
    )
    if match := response.WhichOneof("stop_match"):
        delta.stop_match = getattr(response, match)
    if response.finish_reason:
        delta.finish_reason = _FINISH_BACK.get(response.finish_reason)
        delta.error = response.error.message if response.HasField("error") else None
    return delta


def _logprob_fields(entry: TokenLogprob) -> dict[str, Any]:
    top = [pb.TopLogprob(token_id=token, logprob=logprob) for token, logprob in entry.top]
    return {"token_id": entry.token_id, "logprob": entry.logprob, "top": top}


def _logprob_of(entry: pb.TokenLogprob | pb.PromptLogprob) -> TokenLogprob:
    top = tuple((top.token_id, top.logprob) for top in entry.top)
    return TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, top=top)


def _prompt_logprobs_of(entries: Sequence[pb.PromptLogprob]) -> PromptLogprobs:
    return PromptLogprobs(entries[0].token_id, tuple(map(_logprob_of, entries[1:])))


def model_info_message(info: EngineInfo, tokenizer: Tokenizer) -> pb.GetModelInfoResponse:
    return pb.GetModelInfoResponse(
        name=info.name,
        architecture=info.architecture,
        num_layers=info.num_layers,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        tier="paged",
        backend=info.backend,
        weights=info.weights,
        kv_format=info.kv_format,
        page_size=info.page_size,
        num_pages=info.num_pages,
        eos_token_ids=sorted(tokenizer.eos_ids),
        memory=pb.MemoryBudget(
            weights_bytes=info.memory.weights,
            pages_bytes=info.memory.pages,
            workspace_bytes=info.memory.workspace,
        ),
    )


def adapter_message(info: AdapterInfo) -> pb.Adapter:
    return pb.Adapter(
        name=info.name, path=info.path, rank=info.rank, num_bytes=info.nbytes, digest=info.digest
    )


def pages_message(gauges: Gauges) -> pb.PageCounts:
    held, cached, empty = gauges.pages_held, gauges.pages_idle_cached, gauges.pages_idle_empty
    return pb.PageCounts(held=held, idle_cached=cached, idle_empty=empty)


def server_info_message(gauges: Gauges, *, ready_since: float, draining: bool) -> pb.GetServerInfoResponse:
    """Convert gauges to a message. ``ready_since`` is in seconds of the monotonic clock."""
    return pb.GetServerInfoResponse(
        version=octavo.__version__,
        uptime_seconds=time.monotonic() - ready_since,
        draining=draining,
        num_running=gauges.num_running,
        num_waiting=gauges.num_waiting,
        pages=pages_message(gauges),
    )
