"""Errors of Octavo, as one tree. Every message names the value, the rule and the remedy.

OctavoError
├── InvalidRequest      the caller's mistake: gRPC INVALID_ARGUMENT, exit code 2
│   ├── RequestTooLong  can never fit the model or the page pool
│   ├── Unauthenticated the call has no valid token: gRPC UNAUTHENTICATED
│   └── Forbidden       this token does not permit the call: gRPC PERMISSION_DENIED
├── NotFound            the named thing does not exist: gRPC NOT_FOUND
├── NotConfigured       the engine lacks the feature: gRPC FAILED_PRECONDITION
├── EventsGone          events expired or are in the future: gRPC OUT_OF_RANGE
│   └── FellBehind      events expired while they were read: gRPC DATA_LOSS
├── InvalidConfig       the operator's mistake: exit code 2
│   └── ModelLoadError  unreadable or unsupported model
├── Overloaded          not now: gRPC RESOURCE_EXHAUSTED
│   ├── QueueTimeout    ... because it has waited too long in the queue
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
    """The caller sent no valid credentials."""


class Forbidden(InvalidRequest):
    """The caller is known but lacks permission."""


class NotFound(OctavoError, LookupError):
    """Nothing has this name, or its record has expired."""


class NotConfigured(OctavoError):
    """The engine was started without a feature that the request needs."""


class EventsGone(OctavoError):
    """The requested events have expired or are in the future."""


class FellBehind(EventsGone):
    """Events were not read fast enough, and some have expired."""


class InvalidConfig(OctavoError, ValueError):
    """A setting, or a combination of settings, is not usable."""


class ModelLoadError(InvalidConfig):
    """The model folder cannot be read or the architecture cannot be served."""


class Overloaded(OctavoError):
    """The engine is full; a later attempt may succeed.

    numbers   current values and limits, for programs
    """

    def __init__(self, message: str, **numbers: int) -> None:
        super().__init__(message)
        self.numbers = numbers


class QueueTimeout(Overloaded):
    """The request was not admitted within the time that it may wait."""


class SlowReader(Overloaded):
    """The client has left too much output unread, or for too long."""


class RequestFailed(OctavoError):
    """Computing this request failed; others go on."""


class EngineDead(OctavoError):
    """The engine thread has ended; ``__cause__`` has the reason."""


class EngineStopping(EngineDead):
    """The engine is draining or shut down, and takes no new requests."""
