"""Settings of a process for Apple GPUs: command buffers and memory limits.

By default MLX commits a command buffer after 40 or 50 operations, or earlier if arrays are large
(mlx/backend/metal/device.cpp). Attention binds whole page pools, so each call would need its own command
buffer. Variables that the user has set are left unchanged.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import mlx.core as mx

from ...api.config import EngineConfig
from ...memory.budget import DEFAULT_KV_MEMORY, available_memory
from ...memory.configuration import text_config

OPERATIONS_VARIABLE = "MLX_MAX_OPS_PER_BUFFER"
ELEMENTS_VARIABLE = "MLX_MAX_MB_PER_BUFFER"
_OPERATIONS = 1000
_MIN_MEBI_ELEMENTS = 50
_LAYERS_PER_BUFFER = 4
MIN_CACHE = 1 << 30
"""Bytes of freed buffers that MLX may keep on Metal."""


def _is_metal() -> bool:
    return sys.platform == "darwin" and mx.metal.is_available()


def _working_set() -> int:
    return int(mx.device_info().get("max_recommended_working_set_size", 0))


def prepare_device(config: EngineConfig, model_config: dict[str, Any], weight_bytes: int) -> None:
    """Let a command buffer hold about four layers. Call it before MLX first uses its device."""
    if sys.platform != "darwin" or config.backend == "cpu":
        return
    layers = int(text_config(model_config).get("num_hidden_layers") or 1)
    per_layer = ((config.kv_memory or DEFAULT_KV_MEMORY) + weight_bytes) // max(layers, 1)
    mebi = max(_MIN_MEBI_ELEMENTS, -(-_LAYERS_PER_BUFFER * per_layer // 2 // (1 << 20)))
    os.environ.setdefault(OPERATIONS_VARIABLE, str(_OPERATIONS))
    os.environ.setdefault(ELEMENTS_VARIABLE, str(mebi))


def set_memory_limits(workspace: int) -> None:
    """Wire the recommended working set on Metal, and limit MLX's buffer cache to ``workspace`` bytes."""
    if not _is_metal():
        mx.set_cache_limit(workspace)
        return
    if wired := _working_set():
        mx.set_wired_limit(wired)
    mx.set_cache_limit(max(workspace, MIN_CACHE))


def usable_memory(weight_bytes: int) -> int:
    free = available_memory()
    if not _is_metal() or not (most := _working_set()):
        return free
    return max(0, min(free, most - weight_bytes))


def describe_settings() -> dict[str, Any] | None:
    """Return the settings of this process for ``octavo doctor``; None without Metal."""
    if not _is_metal():
        return None
    return {
        "wired_limit": _working_set(),
        "cache_limit_at_least": MIN_CACHE,
        OPERATIONS_VARIABLE: os.environ.get(OPERATIONS_VARIABLE),
        ELEMENTS_VARIABLE: os.environ.get(ELEMENTS_VARIABLE),
    }
