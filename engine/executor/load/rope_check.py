"""Whether a model's rotary embeddings are the ones that its config.json asks for.

Most of mlx-lm's models read some of the ways to write them and drop the others. Here the frequencies of the
modules that were built are compared with the frequencies by the formulas of transformers
(``modeling_rope_utils.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from numpy.typing import NDArray

from ...api.errors import ModelLoadError
from ...memory.configuration import rope_settings, text_config
from ..mlx_lm_import import rope_utils
from .config_check import Readings

TOLERANCE = 1e-3  # relative, of a frequency or factor: mlx-lm computes them in float32

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Angles per position of each pair that turns, and the factor on the values that turn."""

    frequencies: Doubles
    factor: float

    def is_near(self, other: Rotation) -> bool:
        """Whether both turn alike, up to rounding."""
        return abs(self.factor - other.factor) <= TOLERANCE * abs(other.factor) and np.allclose(
            self.frequencies, other.frequencies, rtol=TOLERANCE, atol=1e-12
        )


def match_rope(model: Module, config: Mapping[str, Any], readings: Readings, origin: str) -> None:
    """Give YaRN modules the frequencies that the configuration asks for, and raise ModelLoadError unless some
    module has each kind of rotary embedding in it. Models without modules of mlx-lm's kinds pass."""
    modules = [module for _, module in model.named_modules() if _built(module) is not None]
    flat = text_config(config)
    settings = rope_settings(flat)
    used = set(flat.get("layer_types") or settings)
    for name, wanted in settings.items():
        if not modules or (name and name not in used) or isinstance(wanted.get("rope_theta"), list | None):
            continue
        if wanted["rope_type"] == "default" and not readings.taken & {"rope_theta", "rope_parameters"}:
            continue  # another model's key: this model has a base of another name
        found = [(module, _wanted(wanted, _dims(module), flat)) for module in modules]
        if all(rotation is None for _, rotation in found):
            continue  # dynamic: depends on the length
        if any(_matches(module, rotation) for module, rotation in found):
            continue
        scaled = [
            (module, rotation)
            for module, rotation in found
            if isinstance(module, rope_utils.YarnRoPE)
            and rotation is not None
            and wanted["rope_type"] == "yarn"
        ]
        for module, rotation in scaled:
            module._freqs = mx.array((1 / rotation.frequencies).astype(np.float32))
            module.mscale = rotation.factor
        if not scaled:
            key = "rope_scaling" if wanted["rope_type"] != "default" else "rope_theta"
            where = f" of {name} layers" if name else ""
            shown = {
                key: value for key, value in wanted.items() if key != "type" and not isinstance(value, list)
            }
            raise ModelLoadError(
                f"{key}{where} in {origin} must be one that mlx-lm's {config['model_type']!r} computes, got "
                f"{shown}, of which it makes {_described(modules)}; serve a model without it"
            )


def _matches(module: Module, wanted: Rotation | None) -> bool:
    built = _built(module)
    return wanted is not None and built is not None and built.is_near(wanted)


def _dims(module: Any) -> int:
    return int(module.dim if isinstance(module, rope_utils.SuScaledRoPE) else module.dims)


def _built(module: Any) -> Rotation | None:
    """Return what a module of mlx-lm's kinds turns; None for other modules."""
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
    """Return what settings ask for in heads of which ``dims`` values turn; None where that depends on the
    length of a sequence, or on a kind that is not known here."""
    plain = _plain(float(settings["rope_theta"]), dims)
    kind, factor = settings["rope_type"], settings.get("factor")
    if kind in ("default", "mrope"):
        return Rotation(plain, 1.0)
    if kind == "linear":
        return Rotation(plain / settings["factor"], 1.0)
    if kind == "llama3":
        return Rotation(_llama3(plain, settings), 1.0)
    if kind == "proportional":
        return None
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
