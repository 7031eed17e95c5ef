"""Check that a model's rotary embeddings match its config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx.utils import tree_unflatten
from numpy.typing import NDArray

from ...api.errors import ModelLoadError
from ...memory.configuration import rope_settings, text_config
from ..mlx_lm_import import ROPES, rope_utils
from .config_check import Readings

TOLERANCE = 1e-3  # relative error

_DEFAULT_BASE = 10000.0  # transformers' default
_SCALED_HERE = ("linear", "llama3", "yarn")
_BY_LENGTH = {"proportional": rope_utils.ProportionalRoPE}

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rotation:
    frequencies: Doubles
    factor: float

    def is_near(self, other: Rotation) -> bool:
        return abs(self.factor - other.factor) <= TOLERANCE * abs(other.factor) and np.allclose(
            self.frequencies, other.frequencies, rtol=TOLERANCE, atol=1e-12
        )


def match_rope(model: Module, config: Mapping[str, Any], readings: Readings, origin: str) -> None:
    """Apply the configured RoPE scaling if mlx-lm left it out, and check the result.

    Raises ModelLoadError if no module computes a configured rotary embedding.
    """
    flat = text_config(config)
    settings = rope_settings(flat)
    _replace_dynamic(model)
    used = set(flat.get("layer_types") or settings)
    for name, wanted in settings.items():
        modules = [module for _, module in model.named_modules() if isinstance(module, ROPES)]
        theta = wanted.get("rope_theta")
        if not modules or (name and name not in used) or isinstance(theta, list):
            continue
        if wanted["rope_type"] == "default" and (
            theta is None or not readings.taken & {"rope_theta", "rope_parameters"}
        ):
            continue
        if _is_built(modules, wanted, flat):
            continue
        if theta is not None:
            _apply(model, wanted, flat, everywhere=not name)
            if _is_built([module for _, module in model.named_modules()], wanted, flat):
                continue
        key = "rope_scaling" if wanted["rope_type"] != "default" else "rope_theta"
        where = f" of {name} layers" if name else ""
        shown = {key: one for key, one in wanted.items() if key != "type" and not isinstance(one, list)}
        raise ModelLoadError(
            f"{key}{where} {shown} in {origin} is not supported: mlx-lm's {config['model_type']!r} would use "
            f"{_described(modules)}; serve a checkpoint without this setting"
        )


def _replace_dynamic(model: Module) -> None:
    plain = [
        (path, RoPE(module.dims, traditional=module.traditional, base=module.base))
        for path, module in model.named_modules()
        if isinstance(module, rope_utils.DynamicNTKScalingRoPE)
    ]
    if plain:
        model.update_modules(tree_unflatten(plain))


def _is_built(modules: Sequence[Module], wanted: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    if (kind := _BY_LENGTH.get(wanted["rope_type"])) is not None:
        return any(isinstance(module, kind) for module in modules)
    bases = {float(module.base) for module in modules if isinstance(module, RoPE)} | {_DEFAULT_BASE}
    for base in [wanted["rope_theta"]] if wanted.get("rope_theta") is not None else bases:
        settings = {**wanted, "rope_theta": base}
        if any(_matches(one, _wanted(settings, _dims(one), config)) for one in modules if _built(one)):
            return True
    return False


def _apply(model: Module, wanted: Mapping[str, Any], config: Mapping[str, Any], *, everywhere: bool) -> None:
    replaced = []
    for path, module in model.named_modules():
        if isinstance(module, rope_utils.YarnRoPE) and wanted["rope_type"] == "yarn":
            if (rotation := _wanted(wanted, module.dims, config)) is not None:
                module._freqs = mx.array((1 / rotation.frequencies).astype(np.float32))
                module.mscale = rotation.factor
        elif everywhere and _is_plain(module, wanted) and wanted["rope_type"] in _SCALED_HERE:
            scaled = rope_utils.initialize_rope(
                module.dims,
                module.base,
                module.traditional,
                dict(wanted),
                config.get("max_position_embeddings"),
            )
            replaced.append((path, scaled))
    if replaced:
        model.update_modules(tree_unflatten(replaced))
        _apply(model, wanted, config, everywhere=False)


def _is_plain(module: Any, wanted: Mapping[str, Any]) -> bool:
    return type(module) is RoPE and module.base == wanted["rope_theta"] and module.scale == 1


def _matches(module: Module, wanted: Rotation | None) -> bool:
    built = _built(module)
    return wanted is not None and built is not None and built.is_near(wanted)


def _dims(module: Any) -> int:
    return int(module.dim if isinstance(module, rope_utils.SuScaledRoPE) else module.dims)


def _built(module: Any) -> Rotation | None:
    if isinstance(module, RoPE):
        return Rotation(_plain(float(module.base), module.dims) * module.scale, 1.0)
    if isinstance(module, rope_utils.SuScaledRoPE):
        factor = float(module._scale)
    elif isinstance(module, rope_utils.YarnRoPE):
        factor = float(module.mscale)
    elif isinstance(module, rope_utils.Llama3RoPE | rope_utils.ProportionalRoPE):
        factor = 1.0
    else:
        return None
    return Rotation(1 / np.array(module._freqs.astype(mx.float32)).astype(np.float64), factor)


def _plain(base: float, dims: int) -> Doubles:
    frequencies: Doubles = base ** -(np.arange(0, dims, 2, dtype=np.float64) / dims)
    return frequencies


def _wanted(settings: Mapping[str, Any], dims: int, config: Mapping[str, Any]) -> Rotation | None:
    plain = _plain(float(settings["rope_theta"]), dims)
    kind, factor = settings["rope_type"], settings.get("factor")
    if kind in ("default", "mrope", "dynamic"):
        return Rotation(plain, 1.0)
    if kind == "linear":
        return Rotation(plain / settings["factor"], 1.0)
    if kind == "llama3":
        return Rotation(_llama3(plain, settings), 1.0)
    before = float(settings.get("original_max_position_embeddings") or 0)
    if kind == "longrope":
        length = float(config.get("max_position_embeddings") or before)
        ratio = length / before if before else 1.0
        attention = settings.get("attention_factor")
        if attention is None:
            attention = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(before))
        long = np.asarray(settings["long_factor"], np.float64)
        return Rotation(plain / long, float(attention)) if long.size in (1, plain.size) else None
    if kind == "yarn" and factor:
        return Rotation(_yarn(plain, settings, dims, before), _yarn_factor(settings))
    return None


def _llama3(plain: Doubles, settings: Mapping[str, Any]) -> Doubles:
    low, high = settings.get("low_freq_factor", 1.0), settings.get("high_freq_factor", 4.0)
    turns = settings["original_max_position_embeddings"] * plain / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    frequencies: Doubles = plain * ((1 - smooth) / settings["factor"] + smooth)
    return frequencies


def _yarn(plain: Doubles, settings: Mapping[str, Any], dims: int, before: float) -> Doubles:
    base = float(settings["rope_theta"])

    def pair_with(turns: float) -> float:
        return dims * math.log(before / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(settings.get("beta_fast") or 32), pair_with(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    high += 0.001 if low == high else 0
    ramp = np.clip((np.arange(dims // 2) - low) / (high - low), 0, 1)
    frequencies: Doubles = plain / settings["factor"] * ramp + plain * (1 - ramp)
    return frequencies


def _yarn_factor(settings: Mapping[str, Any]) -> float:
    def scaled(mscale: float) -> float:
        return 1.0 if settings["factor"] <= 1 else 0.1 * mscale * math.log(settings["factor"]) + 1

    if (given := settings.get("attention_factor")) is not None:
        return float(given)
    mscale, of_all = settings.get("mscale"), settings.get("mscale_all_dim")
    return scaled(mscale) / scaled(of_all) if mscale and of_all else scaled(1)


def _described(modules: list[Any]) -> str:
    kinds = {
        f"{type(m).__name__} of base {m.base:g}" if isinstance(m, RoPE) else type(m).__name__ for m in modules
    }
    return ", ".join(sorted(kinds))
