"""Octavo's engine: ``LLM`` for batches, ``AsyncEngine`` for streams.

Names are imported when first used, so that ``octavo.engine.config`` and the other modules that
need no model stay light: importing this package imports neither MLX nor NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig
    from octavo.engine.errors import (
        EngineDead,
        EngineStopping,
        InvalidConfig,
        InvalidRequest,
        ModelLoadError,
        OctavoError,
        Overloaded,
        QueueTimeout,
        RequestFailed,
        RequestTooLong,
    )
    from octavo.engine.llm import LLM
    from octavo.engine.outputs import Completion, Delta, FinishReason, RequestOutput
    from octavo.engine.params import SamplingParams
    from octavo.engine.service import AsyncEngine

__all__ = [
    "LLM",
    "AsyncEngine",
    "Completion",
    "Delta",
    "EngineConfig",
    "EngineDead",
    "EngineStopping",
    "FinishReason",
    "InvalidConfig",
    "InvalidRequest",
    "ModelLoadError",
    "OctavoError",
    "Overloaded",
    "QueueTimeout",
    "RequestFailed",
    "RequestOutput",
    "RequestTooLong",
    "SamplingParams",
]

_HOMES = {
    "LLM": "llm",
    "AsyncEngine": "service",
    "EngineConfig": "config",
    "SamplingParams": "params",
    "Completion": "outputs",
    "Delta": "outputs",
    "FinishReason": "outputs",
    "RequestOutput": "outputs",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
