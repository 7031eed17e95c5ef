"""Convert a bf16 folder of make_model.py to a GGUF file, for llama.cpp.

    python tests/bench/peers/make_gguf.py q06-16 q06-Q4_0.gguf --type Q4_0

Needs the packages gguf and safetensors. The file has no tokenizer."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from bf16_tensors import bf16_tensors

BLOCK_TENSORS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    base = name.removeprefix("model.").removesuffix(".weight")
    if base.startswith("layers."):
        _, layer, rest = base.split(".", 2)
        return f"blk.{layer}.{BLOCK_TENSORS[rest]}.weight"
    return {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight", "lm_head": "output.weight"}[
        base
    ]


def convert(folder: Path, out: Path, type_name: str) -> None:
    gguf: Any = importlib.import_module("gguf")
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(out), "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    wanted = gguf.GGMLQuantizationType[type_name]
    for name, values in bf16_tensors(folder):
        kind = wanted if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", default="Q4_0", help="Q4_0, Q8_0 or BF16")
    args = parser.parse_args()
    convert(args.folder, args.out, args.type)


if __name__ == "__main__":
    main()
