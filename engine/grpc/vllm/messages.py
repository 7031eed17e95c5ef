"""Conversion between vllm.grpc.engine messages and engine types, as in vLLM 0.32.

Unsupported fields are refused by name.
"""

from __future__ import annotations

from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from ...api.errors import InvalidRequest
from ...api.outputs import Delta, TokenLogprob
from ...api.prompt import Prompt
from ...api.sampling_params import SamplingParams
from ..packed_ids import ids_of
from ..sampling_fields import SamplingFields, structured_of
from .media import with_images

_FIELDS = SamplingFields(pb.SamplingParams.DESCRIPTOR, vllm=True)
_UNSUPPORTED_INPUTS = ("kv_transfer_params", "kv_transfer_params_json", "extra_mm_inputs")
_MEDIA = ("mm_inputs", "media_refs")


def check_supported(request: pb.GenerateRequest, *, takes_images: bool) -> None:
    """Raise InvalidRequest for the first unsupported field."""
    given = {field.name for field, _ in request.ListFields()}
    for name in _UNSUPPORTED_INPUTS:
        if name in given:
            raise _unsupported(name)
    for name in _MEDIA:
        if name in given and not (takes_images and request.HasField("tokenized")):
            raise _unsupported(f"{name} {'of a text' if takes_images else '(images)'}")
    if request.data_parallel_rank:
        raise InvalidRequest(
            "data_parallel_rank must be 0, because this server has one rank, got "
            f"{request.data_parallel_rank}; leave it out"
        )
    sampling = request.sampling_params
    if sampling.HasField("truncate_prompt_tokens"):
        raise _unsupported("sampling_params.truncate_prompt_tokens")


def _unsupported(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field} is not supported by this server; leave it out")


def prompt_of(request: pb.GenerateRequest) -> Prompt:
    """Return the prompt of a request. Raises InvalidRequest."""
    match request.WhichOneof("input"):
        case "tokenized":
            return with_images(request, ids_of(request.tokenized, request.tokenized.input_ids))
        case "text":
            return str(request.text)
        case _:
            raise InvalidRequest("the request has no input; set one of tokenized and text")


def params_of(sampling: pb.SamplingParams, *, default_temperature: float) -> SamplingParams:
    """Return the sampling parameters; an unset temperature becomes ``default_temperature``."""
    kind = sampling.WhichOneof("constraint")
    given = {"temperature": default_temperature} | _FIELDS.read(sampling)
    if "seed" in given:
        given["seed"] %= 2**64  # vLLM's seeds are signed
    return SamplingParams(**given, structured=structured_of(kind, getattr(sampling, kind) if kind else None))


def chunk_of(delta: Delta) -> pb.GenerateResponse:
    chunk = pb.GenerateStreamChunk(
        token_ids=delta.token_ids,
        output_logprobs=_logprobs(delta),
        input_logprobs=_prompt_logprobs(delta),
        **_usage(delta),
    )
    return pb.GenerateResponse(chunk=chunk)


def complete_of(delta: Delta) -> pb.GenerateResponse:
    assert delta.finish_reason is not None
    complete = pb.GenerateComplete(
        output_ids=delta.token_ids,
        finish_reason=delta.finish_reason.value,
        output_logprobs=_logprobs(delta),
        input_logprobs=_prompt_logprobs(delta),
        **_usage(delta),
    )
    if isinstance(delta.stop_match, str):
        complete.matched_stop_str = delta.stop_match
    elif delta.stop_match is not None:
        complete.matched_token_id = delta.stop_match
    return pb.GenerateResponse(complete=complete)


def _usage(delta: Delta) -> dict[str, int]:
    return {
        "prompt_tokens": delta.prompt_tokens,
        "completion_tokens": len(delta.token_ids),
        "cached_tokens": delta.cached_tokens,
        "index": delta.index,
    }


def _logprobs(delta: Delta) -> Any:
    if not delta.logprobs:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in delta.logprobs],
        token_ids=[entry.token_id for entry in delta.logprobs],
        top_logprobs=[_top(entry) for entry in delta.logprobs],
    )


def _prompt_logprobs(delta: Delta) -> Any:
    found = delta.prompt_logprobs
    if found is None:
        return None
    return pb.InputLogProbs(
        token_logprobs=[
            pb.InputTokenLogProb(),
            *(pb.InputTokenLogProb(value=entry.logprob) for entry in found.rest),
        ],
        token_ids=[found.first_id, *(entry.token_id for entry in found.rest)],
        top_logprobs=[pb.TopLogProbs(), *map(_top, found.rest)],
    )


def _top(entry: TokenLogprob) -> pb.TopLogProbs:
    return pb.TopLogProbs(
        values=[logprob for _, logprob in entry.top], token_ids=[token for token, _ in entry.top]
    )
