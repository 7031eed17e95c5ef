"""HTTP statuses and bodies of errors, in each API's format."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from ..api.errors import EngineDead, InvalidRequest, OctavoError, Overloaded, RequestTooLong
from ..grpc.status import RETRY_S, code_of, text_of

STATUSES = {
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_MESSAGE_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
_CODES = {401: "invalid_api_key", 404: "not_found", 429: "overloaded", 503: "unavailable"}

_CLIENT_NAMES = {
    "logprobs": "top_logprobs",
    "stop": "stop_sequences",
    "stop_ids": "stop_token_ids",
    "prompt": "input",
    "max_tokens": "max_completion_tokens max_output_tokens",
    "structured": "structured_outputs guided_choice",
    "max_reasoning_tokens": "thinking_token_budget thinking.budget_tokens",
    "json_schema": "guided_json structured_outputs.json response_format.json_schema.schema "
    "text.format.schema output_config.format.schema",
    "regex": "guided_regex structured_outputs.regex",
    "choice": "guided_choice structured_outputs.choice",
    "grammar": "guided_grammar ebnf structured_outputs.grammar",
    "structural_tag": "structured_outputs.structural_tag response_format",
}


class FieldError(InvalidRequest):
    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def named(error: InvalidRequest, request: Any) -> InvalidRequest:
    """Return the error, with the field's HTTP name in its text."""
    found = re.match(r"(\w+)[\w.\[\]]*", str(error))
    if type(error) is not InvalidRequest or found is None:
        return error
    for name in (*_CLIENT_NAMES.get(found[1], "").split(), found[1]):
        if _field(request, name) is not None:
            path = request.client_path(name + found[0][len(found[1]) :])
            return FieldError(path, path + str(error)[len(found[0]) :])
    return error


def _field(request: object, path: str) -> object:
    for name in path.split("."):
        request = getattr(request, f"{name}_", getattr(request, name, None))
    return request


class ModelNotServed(OctavoError, LookupError): ...


class HttpRefusal(OctavoError):
    """An invalid use of HTTP, with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def status_of(error: Exception) -> int:
    if isinstance(error, HttpRefusal):
        return error.status
    if isinstance(error, ModelNotServed):
        return 404
    return STATUSES.get(code_of(error), 500)


def headers_of(error: Exception) -> list[tuple[bytes, bytes]]:
    status = status_of(error)
    if status == 401:
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, Overloaded | EngineDead):
        return [(b"retry-after", str(RETRY_S).encode())]
    return []


def error_body(error: Exception) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    status = status_of(error)
    code: str | None = _CODES.get(status)
    if isinstance(error, RequestTooLong):
        code = "context_length_exceeded"
    elif isinstance(error, ModelNotServed):
        code = "model_not_found"
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    param = error.param if isinstance(error, FieldError) else None
    return {"error": {"message": text_of(error), "type": kind, "param": param, "code": code}}


def message_error_body(error: Exception) -> dict[str, Any]:
    """Return an error in Anthropic's format."""
    status = status_of(error)
    kind = _MESSAGE_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    text = text_of(error)
    if isinstance(error, RequestTooLong):  # this text makes Claude Code compact the conversation
        text = f"prompt is too long: {text}"
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": None}


@dataclass(frozen=True, slots=True)
class ErrorForm:
    body: Callable[[Exception], dict[str, Any]]
    event: str = ""
    last: bytes = b"data: [DONE]\n\n"


_OPENAI = ErrorForm(error_body)
_ANTHROPIC = ErrorForm(message_error_body, event="error", last=b"")


def error_form(path: str) -> ErrorForm:
    return _ANTHROPIC if path.startswith("/v1/messages") else _OPENAI
