"""Write RUN/checkpoint.pt as a Hugging Face folder (bf16) that mlx-lm and Octavo load.

cd tools && python -m demo_model.export --run RUN --out ../engine/demo
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from octavo_lab.bench.ledgers.words import END, START, STOP

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def model_config(shape: dict[str, int | float], *, stop: int, end: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **shape,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": stop,
        "pad_token_id": end,
    }


def hybrid_config(shape: dict[str, int | float], *, stop: int, end: int) -> dict[str, object]:
    """Return the config.json of an Olmo hybrid whose first layer is attention."""
    layers = int(shape["num_hidden_layers"])
    return model_config(shape, stop=stop, end=end) | {
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        "layer_types": ["full_attention"] + (layers - 1) * ["linear_attention"],
        "linear_allow_neg_eigval": False,
        "layer_norm_epsilon": shape["rms_norm_eps"],
        "rope_parameters": {"rope_type": "default", "rope_theta": shape["rope_theta"]},
    }


def generation_config(*, stop: int, end: int) -> dict[str, object]:
    return {"do_sample": False, "eos_token_id": [stop, end], "pad_token_id": end, "max_new_tokens": 256}


def tokenizer_config(max_length: int) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": None,
        "eos_token": STOP,
        "pad_token": END,
        "additional_special_tokens": [START],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def export(run: Path, out: Path) -> None:
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    vocabulary = json.loads((run / "tokenizer.json").read_text())["model"]["vocab"]
    end, stop = vocabulary[END], vocabulary[STOP]
    configure = hybrid_config if "linear_num_key_heads" in state["config"] else model_config
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state["model"].items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(run / "tokenizer.json", out / "tokenizer.json")
    for name, content in (
        ("config.json", configure(state["config"], stop=stop, end=end)),
        ("generation_config.json", generation_config(stop=stop, end=end)),
        ("tokenizer_config.json", tokenizer_config(state["config"]["max_position_embeddings"])),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"step {state['step']}, {state['tokens']} tokens -> {out}: {size / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    export(options.run, options.out)


if __name__ == "__main__":
    main()
