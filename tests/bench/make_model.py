"""Make a randomly initialised model folder in mlx-lm's format, for benchmarks.

    python tests/bench/make_model.py OUT [--layers 28 --hidden 1024 ... --bits 16|8|4 --seed 0]

The default shape is Qwen3-0.6B (596 M parameters, 1.2 GB in bf16). ``--hybrid``: layers as in Qwen3.5;
``--latents``: as in DeepSeek-V3. The tokenizer is the demo model's, padded. Generated text is meaningless."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

import octavo.engine

DEMO = Path(octavo.engine.__file__).parent / "demo"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


HYBRID = {  # as Qwen3.5: three gated delta nets, then one attention layer
    "model_type": "qwen3_5",
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}


def hybrid_shape(heads: int, head_dim: int) -> dict[str, Any]:
    numbers = {f"linear_num_{kind}_heads": heads for kind in ("key", "value")}
    return HYBRID | numbers | {f"linear_{kind}_head_dim": head_dim for kind in ("key", "value")}


def latent_shape(layers: int, head_dim: int) -> dict[str, Any]:
    """DeepSeek-V3 without experts: a token caches a latent of 512 values and a rotary key of 64."""
    return {
        "model_type": "deepseek_v3", "first_k_dense_replace": layers, "n_routed_experts": None,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": head_dim,
        "v_head_dim": head_dim,
    }  # fmt: skip


def make_model(out: Path, shape: dict[str, Any], *, bits: int, group_size: int, seed: int) -> None:
    """Write the model; ``bits`` 16 is bf16, 8 and 4 are MLX affine groups."""
    config: dict[str, Any] = {
        **json.loads((DEMO / "config.json").read_text()),
        **shape,
        "torch_dtype": "bfloat16",
    }
    mx.set_default_device(mx.cpu)
    mx.random.seed(seed)
    module: Any = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    if bits != 16:
        nn.quantize(model, group_size, bits)  # type: ignore[attr-defined]
        config["quantization"] = {"group_size": group_size, "bits": bits}
    weights = dict(tree_flatten(model.parameters()))
    for weight in weights.values():
        mx.eval(weight)
    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copyfile(DEMO / name, out / name)
    num_bytes = sum(weight.nbytes for weight in weights.values())
    print(f"{out}: {shape['num_hidden_layers']} layers, {num_bytes / 1e6:.0f} MB of weights")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    for name, default in (
        ("layers", 28),
        ("hidden", 1024),
        ("heads", 16),
        ("kv-heads", 8),
        ("head-dim", 128),
        ("intermediate", 3072),
        ("vocab", 151_936),
        ("max-len", 40_960),
        ("group-size", 64),
        ("seed", 0),
        ("linear-heads", 16),
        ("linear-head-dim", 128),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"({default})")
    parser.add_argument("--bits", type=int, choices=(16, 8, 4), default=16, help="16 is bf16 (16)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--hybrid", action="store_true", help="three of four layers are gated delta nets")
    kinds.add_argument("--latents", action="store_true", help="layers cache latents (MLA)")
    args = parser.parse_args()
    shape: dict[str, Any] = {
        "num_hidden_layers": args.layers, "hidden_size": args.hidden, "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads, "head_dim": args.head_dim,
        "intermediate_size": args.intermediate, "vocab_size": args.vocab,
        "max_position_embeddings": args.max_len, "rope_theta": 1_000_000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    if args.hybrid:
        shape |= hybrid_shape(args.linear_heads, args.linear_head_dim)
    if args.latents:
        shape |= latent_shape(args.layers, args.head_dim)
    make_model(args.out, shape, bits=args.bits, group_size=args.group_size, seed=args.seed)


if __name__ == "__main__":
    main()
