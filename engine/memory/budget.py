from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.kernels.interface import LayerSpec, PoolSpec

from ..api.errors import InvalidConfig, ModelLoadError
from .configuration import text_config
from .weight_files import weight_files

DEFAULT_KV_MEMORY = 2 * 1024**3
DEFAULT_SEQUENCE_TOKENS = 2048
SHORT_SEQUENCE_TOKENS = 256  # tokens assumed per sequence if num_pages is set


def format_size(size: int) -> str:
    """Return a size with three significant digits in binary units: 2147483648 -> "2.00 GiB"."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    if unit == "B":
        return f"{size} B"
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def page_bytes(layers: Sequence[LayerSpec], *, page_size: int, k_format: str, v_format: str) -> int:
    """Return the bytes of one page over all layers, K and V. Raises InvalidConfig."""
    spec = PoolSpec(
        layers=tuple(layers), num_pages=1, page_size=page_size, k_format=k_format, v_format=v_format
    )
    try:
        return spec.page_bytes
    except ValueError as error:
        raise InvalidConfig(str(error)) from None


def workspace_bytes(
    config: Mapping[str, Any],
    *,
    max_step_tokens: int,
    max_running: int,
    vocab_size: int,
    activation_bytes: int = 2,
) -> int:
    """Return an estimate of the bytes of a step's arrays."""
    flat = text_config(config)
    hidden = int(flat.get("hidden_size") or flat.get("n_embd") or 4096)
    inner = int(flat.get("intermediate_size") or 4 * hidden)
    experts = int(flat.get("num_experts_per_tok") or 1)
    activations = 4 * max_step_tokens * max(inner * experts, hidden) * activation_bytes
    return activations + 2 * max_running * vocab_size * activation_bytes


def encoding_bytes(config: Mapping[str, Any], *, num_patches: int, activation_bytes: int) -> int:
    """Return an estimate of the largest arrays during the encoding of an image, in bytes."""
    vision = config["vision_config"]
    hidden = int(vision.get("embed_dim") or vision["hidden_size"])
    inner = int(vision.get("intermediate_size") or 4 * hidden)
    heads = int(vision.get("num_heads") or vision["num_attention_heads"])
    scores = 3 * heads * num_patches**2
    return (scores + num_patches * (6 * hidden + 3 * inner)) * activation_bytes


def available_memory() -> int:
    """Return the bytes that this process may still use."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup")
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, usage = (group / limit_name).read_text(), (group / usage_name).read_text()
        except OSError:
            continue
        if limit.strip().isdigit():
            free = min(free, max(0, int(limit) - int(usage)))
    return free


def weights_bytes(path: Path) -> int:
    """Return the bytes of all tensors in the folder's safetensors files."""
    return sum(
        tensor["data_offsets"][1] - tensor["data_offsets"][0]
        for file in weight_files(path)
        for tensor in tensors_of(file).values()
    )


def tensors_of(file: Path) -> dict[str, dict[str, list[int]]]:
    """Return name -> {dtype, shape, data_offsets} from the header of a safetensors file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > size - 8:
                raise ValueError(f"its header claims {length} bytes, but the file has {size}")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        if end > size:
            raise ValueError(f"it must be {end} bytes long, but has {size}")
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelLoadError(f"{file} is damaged: {error}; download or copy it again") from error
    tensors: dict[str, dict[str, list[int]]] = header
    return tensors
