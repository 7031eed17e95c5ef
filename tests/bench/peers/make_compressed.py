"""Convert a bf16 folder of make_model.py to compressed-tensors weights, for vLLM.

    python tests/bench/peers/make_compressed.py q06-16 q06-w8a8 --scheme w8a8

w8a8   int8 weights with one scale per row, int8 activations with one scale per token
w4a16  int4 weights in groups of 64, 16-bit activations

Scales come from the largest magnitude. The embedding, which is also the output layer, stays in 16 bits."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from bf16_tensors import bf16_tensors

GROUP = 64

Floats = npt.NDArray[np.float32]


def w8a8(weight: Floats) -> dict[str, mx.array]:
    """Return codes and scales of ``weight`` [outputs, inputs]; the keys are suffixes of tensor names."""
    scale = np.abs(weight).max(axis=1, keepdims=True) / 127
    return {
        "weight": mx.array(np.rint(weight / scale).astype(np.int8)),
        "weight_scale": mx.array(scale).astype(mx.bfloat16),
    }


def w4a16(weight: Floats) -> dict[str, mx.array]:
    """Return scales, and codes plus 8; an int32 has eight codes, the first in the lowest bits."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // GROUP, GROUP)
    scale = np.abs(groups).max(axis=2, keepdims=True) / 7
    codes = (np.clip(np.rint(groups / scale), -8, 7) + 8).astype(np.uint32).reshape(rows, columns // 8, 8)
    packed = (codes << np.arange(0, 32, 4, dtype=np.uint32)).sum(axis=2, dtype=np.uint32)
    return {
        "weight_packed": mx.array(packed.view(np.int32)),
        "weight_scale": mx.array(scale[:, :, 0]).astype(mx.bfloat16),
        "weight_shape": mx.array([rows, columns], mx.int64),
    }


SCHEMES: dict[str, tuple[Any, str, dict[str, Any], dict[str, Any] | None]] = {
    "w8a8": (
        w8a8,
        "int-quantized",
        {"num_bits": 8, "strategy": "channel"},
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
    ),
    "w4a16": (w4a16, "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}, None),
}


def convert(folder: Path, out: Path, scheme: str) -> None:
    quantize, form, weights, activations = SCHEMES[scheme]
    arrays: dict[str, mx.array] = {}
    for name, values in bf16_tensors(folder):
        if values.ndim == 2 and "_proj." in name:
            base = name.removesuffix("weight")
            arrays |= {base + suffix: array for suffix, array in quantize(values).items()}
        else:
            arrays[name] = mx.array(values).astype(mx.bfloat16)
    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out / "model.safetensors"), arrays, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3ForCausalLM"]
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights | {"type": "int", "symmetric": True, "dynamic": False},
                "input_activations": activations,
                "output_activations": None,
            }
        },
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in folder.iterdir():
        if path.suffix == ".json" and path.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copyfile(path, out / path.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scheme", choices=SCHEMES, default="w8a8")
    args = parser.parse_args()
    convert(args.folder, args.out, args.scheme)


if __name__ == "__main__":
    main()
