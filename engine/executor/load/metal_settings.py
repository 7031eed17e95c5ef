"""Settings of a process for Apple GPUs: command buffers and memory limits.

By default MLX commits a command buffer after 40 or 50 operations, or earlier if arrays are large
(mlx/backend/metal/device.cpp). Attention binds whole page pools, so each call would need its own command
buffer. Variables that the user has set are left unchanged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from typing import Any, Protocol

import mlx.core as mx

from ...api.config import EngineConfig
from ...memory.budget import DEFAULT_KV_MEMORY, available_memory
from ...memory.configuration import text_config

OPERATIONS_VARIABLE = "MLX_MAX_OPS_PER_BUFFER"
ELEMENTS_VARIABLE = "MLX_MAX_MB_PER_BUFFER"
_OPERATIONS = 1000
_LEAST_MEBI_ELEMENTS = 50
_LAYERS_PER_BUFFER = 4
LEAST_CACHE = 1 << 30
"""Bytes of freed buffers that MLX may keep on Metal."""


class Device(Protocol):
    def is_metal(self) -> bool: ...

    def working_set(self) -> int:
        """Return the recommended maximum of GPU memory in bytes."""

    def set_wired_limit(self, size: int) -> None: ...

    def set_cache_limit(self, size: int) -> None: ...


class MLXDevice:
    def is_metal(self) -> bool:
        return sys.platform == "darwin" and mx.metal.is_available()

    def working_set(self) -> int:
        return int(mx.device_info().get("max_recommended_working_set_size", 0))

    def set_wired_limit(self, size: int) -> None:
        mx.set_wired_limit(size)

    def set_cache_limit(self, size: int) -> None:
        mx.set_cache_limit(size)


def set_command_buffers(
    environ: MutableMapping[str, str], *, pool_bytes: int, weight_bytes: int, num_layers: int
) -> None:
    per_layer = (pool_bytes + weight_bytes) // max(num_layers, 1)
    mebi = max(_LEAST_MEBI_ELEMENTS, -(-_LAYERS_PER_BUFFER * per_layer // 2 // (1 << 20)))
    environ.setdefault(OPERATIONS_VARIABLE, str(_OPERATIONS))
    environ.setdefault(ELEMENTS_VARIABLE, str(mebi))


def prepare_device(
    config: EngineConfig,
    model_config: dict[str, Any],
    weight_bytes: int,
    *,
    environ: MutableMapping[str, str] | None = None,
    platform: str = sys.platform,
) -> None:
    if platform != "darwin" or config.backend == "cpu":
        return
    layers = int(text_config(model_config).get("num_hidden_layers") or 1)
    set_command_buffers(
        os.environ if environ is None else environ,
        pool_bytes=config.kv_memory or DEFAULT_KV_MEMORY,
        weight_bytes=weight_bytes,
        num_layers=layers,
    )


def set_memory_limits(workspace: int, device: Device | None = None) -> None:
    """Wire the recommended working set on Metal, and limit MLX's buffer cache to ``workspace`` bytes."""
    device = MLXDevice() if device is None else device
    if not device.is_metal():
        device.set_cache_limit(workspace)
        return
    if wired := device.working_set():
        device.set_wired_limit(wired)
    device.set_cache_limit(max(workspace, LEAST_CACHE))


def usable_memory(weight_bytes: int, device: Device | None = None) -> int:
    device = MLXDevice() if device is None else device
    free = available_memory()
    if not device.is_metal() or not (most := device.working_set()):
        return free
    return max(0, min(free, most - weight_bytes))


def describe_settings(
    device: Device | None = None, environ: MutableMapping[str, str] | None = None
) -> dict[str, Any] | None:
    """Return the settings of this process for ``octavo doctor``; None without Metal."""
    device, environ = MLXDevice() if device is None else device, os.environ if environ is None else environ
    if not device.is_metal():
        return None
    return {
        "wired_limit": device.working_set(),
        "cache_limit_at_least": LEAST_CACHE,
        OPERATIONS_VARIABLE: environ.get(OPERATIONS_VARIABLE),
        ELEMENTS_VARIABLE: environ.get(ELEMENTS_VARIABLE),
    }
