"""Conversion of errors to gRPC statuses, with details as in google.rpc.

See https://google.aip.dev/193. Clients get a fixed text for unexpected errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import duration_pb2, message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from ..api.errors import (
    EngineDead,
    EventsGone,
    FellBehind,
    Forbidden,
    InvalidConfig,
    InvalidRequest,
    NotConfigured,
    NotFound,
    OctavoError,
    Overloaded,
    SlowReader,
    Unauthenticated,
)

logger = logging.getLogger(__name__)

DOMAIN = "octavo"
RETRY_S = 1  # seconds after which a client may retry
INTERNAL_TEXT = "internal server error; see the server's log"
MAX_TEXT = 2000  # characters of an error message
LAST_WORD_S = 1.0
_DETAILS_KEY = "grpc-status-details-bin"

Context = grpc.aio.ServicerContext[Any, Any]


CODES: tuple[tuple[type[OctavoError], grpc.StatusCode], ...] = (
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (Forbidden, grpc.StatusCode.PERMISSION_DENIED),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (NotConfigured, grpc.StatusCode.FAILED_PRECONDITION),
    (FellBehind, grpc.StatusCode.DATA_LOSS),
    (EventsGone, grpc.StatusCode.OUT_OF_RANGE),
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (InvalidConfig, grpc.StatusCode.INVALID_ARGUMENT),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (EngineDead, grpc.StatusCode.UNAVAILABLE),
)
"""Error classes and their gRPC status codes. The first class that matches an error gives its code. For a code
that it receives, a client raises the first class with that code."""


def code_of(error: Exception) -> grpc.StatusCode:
    """Return the status code of an error; INTERNAL for unexpected errors."""
    return next((code for kind, code in CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def text_of(error: Exception) -> str:
    """Return the text for the client. Unexpected errors are logged and hidden."""
    if isinstance(error, OctavoError):
        text = str(error)
        if len(text) <= MAX_TEXT:
            return text
        return f"{text[: MAX_TEXT // 2]} [...] {text[-MAX_TEXT // 2 :]}"
    logger.error("request failed unexpectedly", exc_info=error)
    return INTERNAL_TEXT


def status_of(error: Exception) -> status_pb2.Status:
    code, text = code_of(error), text_of(error)
    details: list[message.Message] = []
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(description=text)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    else:
        name = type(error).__name__ if isinstance(error, OctavoError) else "Internal"
        reason = "".join(f"_{c}" if c.isupper() else c.upper() for c in name).lstrip("_")
        numbers = error.numbers if isinstance(error, Overloaded) else {}
        metadata = {key: str(number) for key, number in numbers.items()}
        details.append(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        details.append(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=RETRY_S)))
    status = status_pb2.Status(code=code.value[0], message=text)
    for detail in details:
        status.details.add().Pack(detail)
    return status


async def abort_with(context: Context, error: Exception) -> NoReturn:
    status = status_of(error)
    trailers = ((_DETAILS_KEY, status.SerializeToString()),)
    await context.abort(code_of(error), status.message, trailers)
    raise AssertionError("abort returns by raising")


@contextlib.asynccontextmanager
async def errors_as_status(context: Context) -> AsyncIterator[None]:
    """End the call with the status of an error that the block raises."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except grpc.aio.InternalError:
        if not context.cancelled():
            raise
        logger.debug("the client went away while it was being answered")
        raise asyncio.CancelledError from None
    except SlowReader as error:
        await _leave_with(context, error)
    except Exception as error:
        await abort_with(context, error)


async def _leave_with(context: Context, error: SlowReader) -> NoReturn:
    try:
        await asyncio.wait_for(abort_with(context, error), LAST_WORD_S)
    except TimeoutError:
        raise asyncio.CancelledError from None
    raise AssertionError("abort_with returns by raising")
