"""Work of a model per token, computed from the headers of the model's files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from octavo.engine.memory.budget import tensors_of
from octavo.engine.memory.model_files import read_config
from octavo.engine.memory.weight_files import weight_files


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Work of a dense model.

    linear_parameters   weights that are multiplied by every prompt token (without head and embedding)
    streamed_bytes      bytes of weights that a decode step reads
    """

    linear_parameters: int
    streamed_bytes: int


def model_work(path: Path, weights_bytes: int) -> ModelWork | None:
    """Return the work of the model in ``path``; None for mixtures of experts."""
    config = read_config(path)
    quantization = config.get("quantization") or {}
    per_word = 32 // quantization.get("bits", 32)
    tensors = {name: tensor for file in weight_files(path) for name, tensor in tensors_of(file).items()}
    tied = not any("lm_head" in name for name in tensors)
    linear = total_bytes = looked_up_bytes = 0
    for name, tensor in tensors.items():
        if len(tensor["shape"]) > 2:
            return None
        start, end = tensor["data_offsets"]
        total_bytes += end - start
        if "embed" in name:
            looked_up_bytes += 0 if tied else end - start
        elif len(tensor["shape"]) == 2 and name.endswith(".weight") and "lm_head" not in name:
            linear += math.prod(tensor["shape"]) * (per_word if str(tensor["dtype"]) == "U32" else 1)
    return ModelWork(linear, round(weights_bytes * (1 - looked_up_bytes / total_bytes)))
