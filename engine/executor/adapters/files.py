"""Adapter folders in mlx-lm's format (LoRA and DoRA) or in PEFT's.

Files are not trusted: only JSON and safetensors are read, and unknown tensors are refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, deserialize

from ...api.errors import InvalidRequest

MAX_CONFIG_BYTES = 1 << 20
MAX_NUMBER = 1e30  # larger scales give infinity
MAX_NAME = 256  # characters of a tensor's name
_CONFIG = "adapter_config.json"
_FLOATS = {"F32": (np.float32, mx.float32), "F16": (np.float16, mx.float16), "BF16": (np.uint16, mx.bfloat16)}
_LEAVES = {
    "lora_a": "a", "lora_b": "b", "m": "m",
    "lora_A": "a", "lora_B": "b", "lora_magnitude_vector": "m",
}  # fmt: skip
_EXPERT = re.compile(r"(.+)\.experts\.(\d{1,5})\.(\w+)")
_EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # names in Mixtral checkpoints
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "layer_replication": (None,),
    "use_qalora": (False,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of an adapter for one layer, which add ``scale * (x @ a.T) @ b``.

    a          [experts, rank, inputs]; layers without experts have one
    b          [experts, rank, outputs]
    magnitude  [outputs] in DoRA; None in LoRA
    """

    a: mx.array
    b: mx.array
    scale: float
    magnitude: mx.array | None

    @property
    def rank(self) -> int:
        return int(self.a.shape[1])


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """Contents of an adapter's folder; ``digest`` is the SHA-256 of its files."""

    digest: bytes
    layers: Mapping[str, Factors]

    @property
    def rank(self) -> int:
        return max(factors.rank for factors in self.layers.values())


def read_adapter(folder: Path, *, max_bytes: int) -> AdapterFile:
    """Read an adapter of at most ``max_bytes``. Raises InvalidRequest if the adapter is not supported."""
    text = _read(folder / _CONFIG, MAX_CONFIG_BYTES)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{folder / _CONFIG} must be JSON, but cannot be parsed ({error}); save the adapter again"
        ) from None
    if not isinstance(config, dict):
        raise InvalidRequest(f"{folder / _CONFIG} must be a JSON object, got {type(config).__name__}")
    peft = "peft_type" in config
    file = folder / ("adapter_model.safetensors" if peft else "adapters.safetensors")
    data = _read(file, max_bytes)
    parts = _parts(file, data, peft=peft)
    scale_of = _peft_scale(folder, config) if peft else _mlx_lm_scale(folder, config)
    layers = {path: _factors(file, path, part, scale_of, peft=peft) for path, part in parts.items()}
    layers = _stacked(file, layers) if peft else layers
    if not layers:
        raise InvalidRequest(f"{file} must have factors of at least one layer, got none")
    return AdapterFile(hashlib.sha256(text + data).digest(), layers)


def _read(file: Path, max_bytes: int) -> bytes:
    try:
        if not file.is_file():
            raise InvalidRequest(
                f"an adapter must be a folder with {file.name}, got {file.parent} without it; .bin, .pt and "
                ".npz files are not read: save the adapter as safetensors"
            )
        if (size := file.stat().st_size) > max_bytes:
            raise InvalidRequest(
                f"{file} must have at most {max_bytes} bytes, got {size}; unload an adapter, or start "
                "the engine with more lora_memory"
            )
        return file.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}") from None


def _parts(file: Path, data: bytes, *, peft: bool) -> dict[str, dict[str, mx.array]]:
    try:
        tensors: list[tuple[str, dict[str, Any]]] = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise InvalidRequest(f"{file} is damaged: {error}; download or copy it again") from None
    parts: dict[str, dict[str, mx.array]] = {}
    for name, tensor in sorted(tensors, key=lambda each: each[0]):
        bare = name.removeprefix("base_model.model.").removesuffix(".weight").removesuffix(".default")
        path, _, leaf = bare.rpartition(".")
        is_known = leaf in _LEAVES and ((leaf != leaf.lower()) == peft or leaf == "lora_magnitude_vector")
        if not is_known or len(name) > MAX_NAME or not name.isprintable():
            raise InvalidRequest(
                f"{file} must have factors of linear layers only, got {name!r:.200}; train the adapter "
                "without this tensor, or fuse the adapter and serve it as a model"
            )
        parts.setdefault(path, {})[_LEAVES[leaf]] = _array(file, name, tensor)
    return parts


def _array(file: Path, name: str, tensor: Mapping[str, Any]) -> mx.array:
    if tensor["dtype"] not in _FLOATS or 0 in tensor["shape"]:
        raise InvalidRequest(
            f"{name} in {file} must be F32, F16 or BF16 numbers, got {tensor['dtype']} {tensor['shape']}"
        )
    stored, meant = _FLOATS[tensor["dtype"]]
    array = mx.array(np.frombuffer(tensor["data"], stored).reshape(tensor["shape"]))
    array = array.view(meant) if array.dtype != meant else array
    if not mx.all(mx.isfinite(array)).item():
        raise InvalidRequest(f"{name} in {file} must be finite, got NaN or infinity; train the adapter again")
    return array


def _factors(file: Path, path: str, part: dict[str, mx.array], scale_of: Any, *, peft: bool) -> Factors:
    shapes = {leaf: list(array.shape) for leaf, array in part.items()}
    a, b, m = part.get("a"), part.get("b"), part.get("m")
    if a is None or b is None or a.ndim != b.ndim or a.ndim not in (2, 3) or (peft and a.ndim == 3):
        raise InvalidRequest(f"{path} in {file} must have two matrices A and B, got {shapes}")
    if a.ndim == 3:  # mlx-lm's switch layers: [experts, rank, inputs] and [experts, outputs, rank]
        b = b.swapaxes(1, 2)
    elif peft:
        a, b = a[None], b.T[None]
    else:
        a, b = a.T[None], b[None]
    if a.shape[:2] != b.shape[:2] or (m is not None and m.size != b.shape[2]):
        raise InvalidRequest(f"{path} in {file} must have factors of one rank, got {shapes}")
    return Factors(a, b, scale_of(path, int(a.shape[1])), None if m is None else m.reshape(-1))


def _stacked(file: Path, layers: dict[str, Factors]) -> dict[str, Factors]:
    plain, experts = dict[str, Factors](), dict[str, dict[int, Factors]]()
    for path, factors in layers.items():
        if (found := _EXPERT.fullmatch(path)) is None:
            plain[path] = factors
        else:
            where, index, name = found.groups()
            whole = f"{where}.switch_mlp.{_EXPERT_NAMES.get(name, name)}"
            experts.setdefault(whole, {})[int(index)] = factors
    for path, by_index in experts.items():
        each = [by_index[index] for index in sorted(by_index)]
        kinds = {(one.a.shape, one.b.shape, one.scale) for one in each}
        if sorted(by_index) != list(range(len(each))) or len(kinds) > 1:
            raise InvalidRequest(f"{path} in {file} must have factors of one rank and scale for every expert")
        a, b = mx.concatenate([one.a for one in each]), mx.concatenate([one.b for one in each])
        plain[path] = Factors(a, b, each[0].scale, each[0].magnitude)
    return plain


def _mlx_lm_scale(folder: Path, config: dict[str, Any]) -> Any:
    if (kind := config.get("fine_tune_type", "lora")) not in ("lora", "dora"):
        raise InvalidRequest(
            f"fine_tune_type of {folder} must be lora or dora, got {kind!r:.60}; serve the fused model"
        )
    parameters = config.get("lora_parameters")
    scale = _number(folder, "scale", parameters.get("scale") if isinstance(parameters, dict) else None)
    return lambda _path, _rank: scale


def _peft_scale(folder: Path, config: dict[str, Any]) -> Any:
    for name, plain in _PLAIN.items():
        if (value := config.get(name, plain[0])) not in plain:
            raise InvalidRequest(
                f"{name} of {folder} must be {plain[0]!r}, got {value!r:.60}; merge the adapter and serve "
                "it as a model"
            )
    alphas = config.get("alpha_pattern") or {}
    if not isinstance(alphas, dict):
        raise InvalidRequest(f"alpha_pattern of {folder} must be a JSON object, got {alphas!r:.60}")
    first: dict[str, tuple[int, Any]] = {}
    for key, alpha in alphas.items():
        if not re.fullmatch(r"\^?[\w.-]+", plain_key := key.replace("\\.", ".")):
            raise InvalidRequest(
                f"alpha_pattern of {folder} must have names of layers, got {key!r:.60}; write one name for "
                "each layer, or merge the adapter and serve it as a model"
            )
        first.setdefault(plain_key, (len(first), alpha))

    def scale_of(path: str, rank: int) -> float:
        names = path.split(".")
        keys = (f"^{path}", *(".".join(names[start:]) for start in range(len(names))))
        own = min((first[key] for key in keys if key in first), default=(0, config.get("lora_alpha")))
        alpha = _number(folder, "lora_alpha", own[1])
        return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    return scale_of


def _number(folder: Path, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_NUMBER:
        raise InvalidRequest(
            f"{name} of {folder} must be a number below {MAX_NUMBER:g}, got {value!r:.60}; train the "
            "adapter again"
        )
    return float(value)
