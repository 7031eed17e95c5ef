"""Exceptions of Octavo, as one tree.

OctavoError
├── InvalidRequest      client error: gRPC INVALID_ARGUMENT, exit code 2
│   ├── RequestTooLong  never fits the model or the page pool
│   ├── Unauthenticated no valid token: gRPC UNAUTHENTICATED
│   └── Forbidden       no permission: gRPC PERMISSION_DENIED
├── NotFound            unknown name: gRPC NOT_FOUND
├── NotConfigured       feature is off: gRPC FAILED_PRECONDITION
├── EventsGone          events expired or are in the future: gRPC OUT_OF_RANGE
│   └── FellBehind      events expired during reading: gRPC DATA_LOSS
├── InvalidConfig       configuration error: exit code 2
│   └── ModelLoadError  unreadable or unsupported model
├── Overloaded          retry later: gRPC RESOURCE_EXHAUSTED
│   ├── QueueTimeout    waited too long in the queue
│   └── SlowReader      client reads its output too slowly
├── RequestFailed       this request failed: gRPC INTERNAL
└── EngineDead          engine thread has ended: gRPC UNAVAILABLE
    └── EngineStopping  engine is draining or shutting down
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base class of all errors that Octavo raises on purpose."""


class InvalidRequest(OctavoError, ValueError):
    """The request is invalid."""


class RequestTooLong(InvalidRequest):
    """The request can never fit the model or the page pool."""


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
    """A setting, or a combination of settings, is invalid."""


class ModelLoadError(InvalidConfig):
    """The model folder is unreadable, or its architecture is unsupported."""


class Overloaded(OctavoError):
    """The engine is full; retry later. ``numbers`` has the current values and limits."""

    def __init__(self, message: str, **numbers: int) -> None:
        super().__init__(message)
        self.numbers = numbers


class QueueTimeout(Overloaded):
    """The request waited in the queue for longer than its limit."""


class SlowReader(Overloaded):
    """The client read its output too slowly."""


class RequestFailed(OctavoError):
    """Computing this request failed. Other requests continue."""


class EngineDead(OctavoError):
    """The engine thread has ended; ``__cause__`` is the reason."""


class EngineStopping(EngineDead):
    """The engine is draining or shutting down, and accepts no new requests."""
