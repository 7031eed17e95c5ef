"""Octavo's engine: ``LLM`` for batches, ``AsyncEngine`` for streams.

Importing this package imports neither MLX nor NumPy; each name is loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api.config import EngineConfig
    from .api.errors import (
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
    from .api.outputs import Completion, Delta, FinishReason, RequestOutput
    from .api.reranking import RankedDocument, RerankPrompt
    from .api.sampling_params import SamplingParams
    from .api.structured_output import StructuredOutput
    from .frontend.async_engine import AsyncEngine
    from .frontend.llm import LLM

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
    "RankedDocument",
    "RequestFailed",
    "RequestOutput",
    "RequestTooLong",
    "RerankPrompt",
    "SamplingParams",
    "StructuredOutput",
]

_HOMES = {
    "LLM": "frontend.llm",
    "AsyncEngine": "frontend.async_engine",
    "EngineConfig": "api.config",
    "SamplingParams": "api.sampling_params",
    "StructuredOutput": "api.structured_output",
    "Completion": "api.outputs",
    "Delta": "api.outputs",
    "FinishReason": "api.outputs",
    "RequestOutput": "api.outputs",
    "RankedDocument": "api.reranking",
    "RerankPrompt": "api.reranking",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'api.errors')}"), name)
