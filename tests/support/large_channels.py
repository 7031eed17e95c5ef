"""The embedded model with keys that small formats store badly."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np

import octavo.engine

DEMO = Path(octavo.engine.__file__).parent / "demo"


def with_large_channels(folder: Path, scale: float, dtype: mx.Dtype = mx.bfloat16) -> Path:
    shutil.copytree(DEMO, folder)
    weights = cast("dict[str, mx.array]", mx.load(str(DEMO / "model.safetensors")))
    for name, weight in weights.items():
        values = np.array(weight.astype(mx.float32))
        if name.endswith(("k_norm.weight", "q_norm.weight")):
            values[[3, 3 + len(values) // 2]] *= scale if name.endswith("k_norm.weight") else 1 / scale
        weights[name] = mx.array(values).astype(dtype)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder
