"""Tiny random vision-language models of mlx-vlm, as folders, and images for them.

``mlx_vlm`` runs mlx-vlm in a process of its own."""

from __future__ import annotations

import importlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import tokenizers
from mlx.utils import tree_flatten
from mlx_vlm.models.base import create_attention_mask
from tokenizers import decoders, models, pre_tokenizers

VOCAB = 320
SPECIAL = {
    "<|vision_start|>": 300, "<|vision_end|>": 301, "<|image_pad|>": 302, "<|video_pad|>": 303,
    "<|im_start|>": 304, "<|im_end|>": 305, "[IMG_BREAK]": 306, "[IMG_END]": 307, "<|image_start|>": 308,
    "<|image_end|>": 309, "<start_of_image>": 310, "<end_of_image>": 311, "<|image>": 312, "<image|>": 313,
    "<fake_token_around_image>": 314, "<global-img>": 315, "<end_of_utterance>": 316, "<end>": VOCAB - 1,
}  # fmt: skip
IMAGE = SPECIAL["<|image_pad|>"]
MARKS = {
    "pixtral": "[IMG]", "mistral3": "[IMG]", "lfm2-vl": "<image>", "llava": "<image>", "smolvlm": "<image>",
    "idefics3": "<image>", "gemma3": "<start_of_image>", "gemma4": "<|image|>",
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 2,
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
_IDS = {
    "image_token_id": IMAGE, "video_token_id": SPECIAL["<|video_pad|>"],
    "vision_start_token_id": SPECIAL["<|vision_start|>"], "vision_end_token_id": SPECIAL["<|vision_end|>"],
}  # fmt: skip
_INTERLEAVED = {"mrope_interleaved": True, "mrope_section": [4, 2, 2]}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "text_config": _TEXT
        | {
            "model_type": "qwen3_vl_text", "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "default"} | _INTERLEAVED,
        },
        "vision_config": _VISION | {"model_type": "qwen3_vl", "in_chans": 3},
    },
    "qwen2_5_vl": _TEXT  # text fields at the root, as in its checkpoints
    | {
        "rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
        "vision_config": {
            "model_type": "qwen2_5_vl", "depth": 3, "hidden_size": 32, "intermediate_size": 64,
            "out_hidden_size": 64, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "in_channels": 3,
            "window_size": 112, "fullatt_block_indexes": [1], "spatial_patch_size": 14,
        },
    },
    "qwen2_vl": _TEXT
    | {
        "rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
        "vision_config": {
            "model_type": "qwen2_vl", "depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2,
            "image_size": 128, "patch_size": 14, "mlp_ratio": 2, "in_channels": 3, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "spatial_patch_size": 14,
        },
    },
    "qwen3_5": {  # gated delta layers, and one of attention
        "text_config": _TEXT
        | {
            "model_type": "qwen3_5_text", "head_dim": 32, "linear_num_value_heads": 4,
            "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
            "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
            | _INTERLEAVED,
        },
        "vision_config": _VISION | {"model_type": "qwen3_5", "deepstack_visual_indexes": []},
    },
    "pixtral": {
        "text_config": _TEXT | {"model_type": "mistral", "rope_theta": 10000.0},
        "vision_config": {
            "model_type": "pixtral", "num_hidden_layers": 2, "hidden_size": 32, "head_dim": 16,
            "intermediate_size": 64, "num_attention_heads": 2, "image_size": 256, "patch_size": 16,
            "rope_theta": 10000.0,
        },
    },
    "llava": {
        "text_config": _TEXT | {"model_type": "llama", "rope_theta": 10000.0},
        "vision_config": {
            "model_type": "clip_vision_model", "num_hidden_layers": 3, "hidden_size": 32,
            "intermediate_size": 64, "num_attention_heads": 2, "image_size": 96, "patch_size": 16,
            "projection_dim": 64,
        },
        "image_token_index": IMAGE,
    },
    "smolvlm": {
        "text_config": _TEXT | {"model_type": "llama", "rope_theta": 10000.0},
        "vision_config": {
            "model_type": "smolvlm_vision", "num_hidden_layers": 2, "hidden_size": 32,
            "intermediate_size": 64, "num_attention_heads": 2, "image_size": 64, "patch_size": 8,
        },
        "scale_factor": 2,
    },
    "gemma3": {  # layers with and without windows, alternating
        "text_config": _TEXT
        | {
            "model_type": "gemma3_text", "query_pre_attn_scalar": 16, "rope_global_base_freq": 10000.0,
            "rope_theta": 10000.0, "rope_local_base_freq": 1000.0, "sliding_window": 24,
            "sliding_window_pattern": 2, "mm_tokens_per_image": 16,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "num_hidden_layers": 2, "hidden_size": 32,
            "intermediate_size": 64, "num_attention_heads": 2, "patch_size": 8, "image_size": 64,
        },
        "image_token_index": IMAGE, "hidden_size": 64, "pad_token_id": 0, "vocab_size": VOCAB,
        "mm_tokens_per_image": 16,
    },
    "gemma4": {  # windows, embeddings of layers, and two layers that share keys and values
        "text_config": _TEXT
        | {
            "model_type": "gemma4_text", "global_head_dim": 32, "sliding_window": 24,
            "sliding_window_pattern": 2, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB, "use_double_wide_mlp": False, "tie_word_embeddings": True,
            "num_hidden_layers": 6, "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
        "vision_config": {
            "model_type": "gemma4_vision", "num_hidden_layers": 2, "hidden_size": 32,
            "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
            "patch_size": 8, "pooling_kernel_size": 2, "position_embedding_size": 64,
        },
        "vocab_size": VOCAB, "boi_token_id": SPECIAL["<|image>"], "eoi_token_id": SPECIAL["<image|>"],
    },
    "lfm2-vl": {  # short convolutions, and two attention layers
        "text_config": {
            "model_type": "lfm2", "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
            "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 64, "block_ff_dim": 128,
            "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
            "layer_types": ["conv", "full_attention"] * 2, "rope_theta": 10000.0,
        },
        "vision_config": {
            "model_type": "lfm2_vl", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "patch_size": 16, "num_patches": 64,
        },
        "min_image_tokens": 4, "max_image_tokens": 64, "projector_hidden_size": 64,
    },
}  # fmt: skip
CONFIGS["gemma4_whole"] = CONFIGS["gemma4"] | {
    "text_config": CONFIGS["gemma4"]["text_config"]
    | {
        "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0
    },
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
for _name, _more in (
    ("qwen3_vl", {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}),
    ("qwen3_5", {"shared_expert_intermediate_size": 32}),
):
    _text = CONFIGS[_name]["text_config"] | _EXPERTS | _more | {"model_type": f"{_name}_moe_text"}
    _vision = CONFIGS[_name]["vision_config"] | {"model_type": f"{_name}_moe"}
    CONFIGS[f"{_name}_moe"] = CONFIGS[_name] | {"text_config": _text, "vision_config": _vision}
CONFIGS["idefics3"] = CONFIGS["smolvlm"]
CONFIGS["mistral3"] = CONFIGS["pixtral"] | {"spatial_merge_size": 2}
SIDE = {  # pixels per side of the square for one row
    "qwen3_vl": 32, "qwen3_vl_moe": 32, "qwen3_5": 32, "qwen3_5_moe": 32, "qwen2_5_vl": 28, "qwen2_vl": 28,
    "pixtral": 16, "mistral3": 32, "lfm2-vl": 32, "llava": 16, "smolvlm": 16, "idefics3": 16,
    "gemma3": 16, "gemma4": 16, "gemma4_whole": 16,
}  # fmt: skip


_SETTINGS: dict[str, dict[str, Any]] = {
    **{
        architecture: {
            "image_processor_type": f"{name}ImageProcessor",
            "do_resize": False,
            "do_image_splitting": False,
            "max_image_size": {"longest_edge": 64},
        }
        for architecture, name in (("smolvlm", "SmolVLM"), ("idefics3", "Idefics3"))
    },
    **{name: {"size": {"longest_edge": 224}, "patch_size": 16} for name in ("pixtral", "mistral3")},
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 96},
        "crop_size": {"height": 96, "width": 96},
    },
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 64, "width": 64}},
    "gemma4": {"do_normalize": False, "patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 20},
    "lfm2-vl": {"min_image_tokens": 4, "max_image_tokens": 64, "resample": 2},
}


@dataclass(frozen=True)
class Asked:
    parts: tuple[str | bytes, ...]

    @property
    def messages(self) -> list[dict[str, Any]]:
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
            for part in self.parts
        ]
        return [{"role": "user", "content": content}]


def picture(seed: int, width: int, height: int) -> bytes:
    """Return a PNG of coloured blocks, so that every patch differs."""
    from PIL import Image

    small = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def make_vlm(
    folder: Path, architecture: str, *, dtype: mx.Dtype = mx.float32, language: mx.Dtype | None = None
) -> Path:
    """Write a folder: random weights, tokenizer and image settings. ``dtype`` is the vision part's."""
    from mlx_vlm.utils import update_module_configs

    architecture, whole = architecture.removesuffix("_whole"), architecture
    name = "".join(part.capitalize() for part in architecture.split("_"))
    config = CONFIGS[whole] | _IDS | {
        "model_type": architecture, "eos_token_id": VOCAB - 1,
        "architectures": [f"{name}ForConditionalGeneration"],
    }  # fmt: skip
    package = importlib.import_module(f"mlx_vlm.models.{architecture.replace('-', '_')}")
    update: Any = update_module_configs
    mx.random.seed(5 if architecture == "qwen3_vl_moe" else 0)  # with seed 0, two experts get equal scores
    settings = json.loads(json.dumps(config))
    arguments = update(package.ModelConfig.from_dict(settings), package, settings, ["text", "vision"])
    model = package.Model(arguments)
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    # Gemma scales the embedding, which is also the head.
    embedding = 0.1 if architecture.startswith("gemma") else 1.0
    weights = {
        name: _spread(name, value, embedding).astype(
            language or dtype if name.startswith("language_model.") else dtype
        )
        for name, value in parameters.items()
    }
    if architecture == "gemma4":
        weights |= {name: value / 2 for name, value in weights.items() if name.endswith("q_norm.weight")}
    if architecture == "gemma3":
        del weights["language_model.lm_head.weight"]
    if architecture == "idefics3":  # names as in its checkpoints
        weights = {
            name.removeprefix("language_model.") if "lm_head" in name
            else "model." + name.replace("language_model.", "text_model."): value
            for name, value in weights.items()
        }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    _make_tokenizer(folder, MARKS.get(architecture, "<|image_pad|>"), placeholder(architecture))
    settings = {"image_mean": [0.5] * 3, "image_std": [0.4] * 3} | _SETTINGS.get(
        architecture,
        {
            "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": SIDE[architecture] // 2,
            "temporal_patch_size": 2, "merge_size": 2,
            "size": {"shortest_edge": 1024, "longest_edge": 1048576},
        },
    )  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    more: dict[str, Any] = {"patch_size": 16, "image_seq_length": 16, "image_seq_len": 16}
    more |= {"num_additional_image_tokens": 1}
    if architecture in ("pixtral", "llava", "gemma3", "smolvlm", "idefics3"):
        more |= {"vision_feature_select_strategy": "default"}
        (folder / "processor_config.json").write_text(json.dumps(more))
    return folder


def placeholder(architecture: str) -> str:
    return "<image_soft_token>" if architecture == "gemma3" else MARKS.get(architecture, "<|image_pad|>")


def _spread(name: str, value: mx.array, embedding: float) -> mx.array:
    """Scale weights so that attention is far from uniform and images change the output."""
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        return value * 3
    if "embed" in name and value.ndim == 2 and value.shape[0] == VOCAB:
        return embedding * mx.random.normal(value.shape)
    if name.endswith(("mm_input_projection_weight", "position_embedding_table")):
        return mx.random.normal(value.shape)
    if value.ndim == 1:
        return value + 0.3 * mx.random.normal(value.shape)
    return value * 2


def _make_tokenizer(folder: Path, mark: str, placeholder: str) -> None:
    special = {(placeholder if id_ == IMAGE else name): id_ for name, id_ in SPECIAL.items()}
    names = {id_: name for name, id_ in special.items()}
    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    alphabet |= {names.get(i, f"<unused{i}>"): i for i in range(len(alphabet), VOCAB)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<end>",
                "chat_template": TEMPLATE.replace("<|image_pad|>", mark),
                "image_token": placeholder,
                "boi_token": "<|image>" if mark == "<|image|>" else "<start_of_image>",
                "eoi_token": "<image|>" if mark == "<|image|>" else "<end_of_image>",
            }
        )
    )


@dataclass(frozen=True)
class Answer:
    """mlx-vlm's greedy tokens, and the distance between the two best logits of each."""

    tokens: list[int]
    margins: list[float]


Ask = Callable[[Path, list[Asked], int], list[Answer]]


@contextmanager
def mlx_vlm() -> Iterator[Ask]:
    """Yield a function that returns greedy tokens of mlx-vlm's processor and ``generate_step``.

    One process without Octavo answers for all models."""
    command = [sys.executable, str(Path(__file__))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, lines = process.stdin, process.stdout

        def ask(model: Path, work: list[Asked], count: int) -> list[Answer]:
            files = {part: model / f"{index}.png" for index, part in enumerate(_pictures(work))}
            for data, file in files.items():
                file.write_bytes(data)
            jobs = [
                [
                    {"text": part} if isinstance(part, str) else {"image": str(files[part])}
                    for part in each.parts
                ]
                for each in work
            ]
            print(json.dumps({"model": str(model), "count": count, "jobs": jobs}), file=asked, flush=True)
            answers = next(line for line in lines if line.startswith('[{"tokens"'))
            return [Answer(**each) for each in json.loads(answers)]

        yield ask
        asked.close()


def _see_images_whole(ids: npt.NDArray[np.integer]) -> None:
    """Let the rows of an image see all of it, as in training; mlx-vlm's generation is causal."""
    language: Any = importlib.import_module("mlx_vlm.models.gemma3.language")
    at, is_row = np.arange(len(ids)), ids == IMAGE
    image = np.cumsum(is_row & ~np.roll(is_row, 1)) * is_row
    same = (image[:, None] == image) & is_row

    def mask(h: mx.array, cache: object, window_size: int | None = None) -> object:
        if h.shape[1] == 1:
            return create_attention_mask(h, cache, window_size=window_size)
        causal = (at <= at[:, None]) & (at > at[:, None] - (window_size or len(ids)))
        return mx.array(causal | same)

    language.create_attention_mask = mask


def _pictures(work: list[Asked]) -> list[bytes]:
    return list({part: None for asked in work for part in asked.parts if isinstance(part, bytes)})


def _answers(asked: dict[str, Any]) -> list[dict[str, Any]]:
    import jinja2
    from mlx_vlm.generate.ar import generate_step
    from mlx_vlm.utils import load_model, load_processor
    from PIL import Image

    model = load_model(Path(asked["model"]))
    processor = load_processor(asked["model"], False)
    source = json.loads((Path(asked["model"]) / "tokenizer_config.json").read_text())["chat_template"]
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    answers = []
    for parts in asked["jobs"]:
        content = [{"type": "text", **part} if "text" in part else {"type": "image"} for part in parts]
        text = template.render(messages=[{"role": "user", "content": content}], add_generation_prompt=True)
        images = [Image.open(part["image"]) for part in parts if "image" in part]
        for name in ("_position_ids", "_rope_deltas"):
            if hasattr(model.language_model, name):
                setattr(model.language_model, name, None)
        made = processor(text=[text], images=images or None)
        taken = ("input_ids", "attention_mask", "pixel_values")
        more: dict[str, Any] = {name: mx.array(np.array(made[name])) for name in made if name not in taken}
        ids = mx.array(np.array(made["input_ids"]))
        if type(model).__module__ == "mlx_vlm.models.gemma3.gemma3":
            _see_images_whole(np.array(ids)[0])
        pixels: Any = made["pixel_values"] if images else None
        if isinstance(pixels, list) and len({np.shape(each) for each in pixels}) > 1:
            pixels = [mx.array(np.array(each)) for each in pixels]
        elif images:
            pixels = mx.array(np.array(pixels))
        steps = generate_step(
            ids, model, pixels, mx.ones_like(ids), max_tokens=asked["count"], temperature=0.0,
            prefill_step_size=None, **more,
        )  # fmt: skip
        tokens, margins = [], []
        for token, logprobs in steps:
            best = np.sort(np.array(logprobs.astype(mx.float32)).reshape(-1))[-2:]
            tokens.append(int(token))
            margins.append(float(best[1] - best[0]))
            if len(tokens) == asked["count"]:
                break
        answers.append({"tokens": tokens, "margins": margins})
    return answers


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    for line in sys.stdin:
        print(json.dumps(_answers(json.loads(line))), flush=True)
