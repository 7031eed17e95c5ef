"""Errors of Octavo, as one tree. Every message names the value, the rule and the remedy.

OctavoError
├── InvalidRequest      the caller's mistake: gRPC INVALID_ARGUMENT, exit code 2
│   ├── RequestTooLong  can never fit the model or the page pool
│   ├── Unauthenticated no valid token: gRPC UNAUTHENTICATED
│   └── Forbidden       not with this token: gRPC PERMISSION_DENIED
├── NotFound            nothing has this name: gRPC NOT_FOUND
├── NotConfigured       the engine was started without it: gRPC FAILED_PRECONDITION
├── EventsGone          ... or yet to come: gRPC OUT_OF_RANGE
│   └── FellBehind      while they were being read: gRPC DATA_LOSS
├── InvalidConfig       the operator's mistake: exit code 2
│   └── ModelLoadError  unreadable or unsupported model
├── Overloaded          not now: gRPC RESOURCE_EXHAUSTED
│   ├── QueueTimeout    ... as it turned out
│   └── SlowReader      ... because the client does not read what it gets
├── RequestFailed       this request only: gRPC INTERNAL
└── EngineDead          the engine thread has ended: gRPC UNAVAILABLE, for everybody
    └── EngineStopping  ... or is about to, on purpose (drain, shutdown)
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of every error Octavo raises on purpose."""


class InvalidRequest(OctavoError, ValueError):
    """The request cannot be served as it is written."""


class RequestTooLong(InvalidRequest):
    """The request could never fit, even alone."""


class Unauthenticated(InvalidRequest):
    """The caller did not show who it is."""


class Forbidden(InvalidRequest):
    """The caller is known, and may not do this."""


class NotFound(OctavoError, LookupError):
    """Nothing has this name, or it is forgotten."""


class NotConfigured(OctavoError):
    """The engine was started without what the request needs."""


class EventsGone(OctavoError):
    """Events that were asked for are no longer kept, or yet to come."""


class FellBehind(EventsGone):
    """Events came faster than they were read, and some are no longer kept."""


class InvalidConfig(OctavoError, ValueError):
    """A setting, or a combination of settings, is not usable."""


class ModelLoadError(InvalidConfig):
    """The model folder cannot be read or the architecture cannot be served."""


class Overloaded(OctavoError):
    """The engine is full; trying again later may work.

    numbers   what there is and what may be, for programs
    """

    def __init__(self, message: str, **numbers: int) -> None:
        super().__init__(message)
        self.numbers = numbers


class QueueTimeout(Overloaded):
    """The request was not begun in the time that it may wait."""


class SlowReader(Overloaded):
    """The client has not read its output for too long, or too much of it."""


class RequestFailed(OctavoError):
    """Computing this request failed; others go on."""


class EngineDead(OctavoError):
    """The engine thread has ended; ``__cause__`` says why."""


class EngineStopping(EngineDead):
    """The engine is shutting down, or was shut down, and takes no new requests."""
