"""Families of vision models: conversion of a picture to pixels, tokens and tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...api.errors import InvalidConfig, ModelLoadError
from ...api.image import ImageRules

Floats = npt.NDArray[np.float32]
Settings = Mapping[str, Any]


class Family(NamedTuple):
    fields: Callable[[Settings, Settings], dict[str, Any]]
    tensors: Callable[[ImageRules, Floats], tuple[Floats, dict[str, Any]]]
    scales: bool = False


def read_rules(path: Path, config: Settings, *, max_pixels: int) -> ImageRules:
    """Return the image rules of a model folder. Raises InvalidConfig or ModelLoadError."""
    name = config["model_type"]
    if name not in FAMILIES or "vision_config" not in config:
        raise InvalidConfig(
            f"vision must be left out for {name} models{_REFUSED.get(name, '')}; images are supported for "
            f"{', '.join(FAMILIES)} models whose config.json has a vision_config"
        )
    settings = _settings(path)
    if settings.get("rescale_factor", 1 / 255) != 1 / 255:
        raise ModelLoadError(f"{path} must rescale pixels by 1/255; serve the model without vision")
    try:
        fields = FAMILIES[name].fields(config, settings)
        fields["token"] = config["image_token_id" if "image_token_id" in config else "image_token_index"]
        if ends := fields.get("line_ends"):
            added = {each["content"]: each["id"] for each in _read(path / "tokenizer.json")["added_tokens"]}
            fields["line_ends"] = tuple(added[end] for end in ends)
    except KeyError as error:
        raise ModelLoadError(f"{path} must set {error.args[0]}; serve the model without vision") from None
    side = fields["patch"] * fields["merge"]
    fields["max_pixels"] = max(side * side, min(fields["max_pixels"], max_pixels))
    fields["resample"] = settings.get("resample", fields.get("resample", 3))
    if settings.get("do_normalize", "mean" in fields):
        fields |= {name: tuple(settings.get(f"image_{name}", fields[name])) for name in ("mean", "std")}
    else:
        fields |= {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    return ImageRules(**fields)


def _read(file: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}; download the model again") from error
    return read


def _settings(path: Path) -> Settings:
    found = _read(path / "preprocessor_config.json")
    processor = _read(path / "processor_config.json")
    found |= processor.get("image_processor") or {}
    return {name: value for name, value in found.items() if value is not None}


def tensors_of(
    family: str, rules: ImageRules, pixels: npt.NDArray[np.uint8]
) -> tuple[Floats, dict[str, Any]]:
    """Return the inputs of mlx-vlm's ``get_input_embeddings`` for pixels [H, W, 3]."""
    scaled = pixels.astype(np.float32) * np.float32(1 / 255)
    values = (scaled - np.array(rules.mean, np.float32)) / np.array(rules.std, np.float32)
    return FAMILIES[family].tensors(rules, np.asarray(values, np.float32))


_HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
_CLIP = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}


def _qwen(config: Settings, settings: Settings) -> dict[str, Any]:
    size = settings.get("size", {})
    patch = settings if "patch_size" in settings else config["vision_config"]
    return {
        "mark": "<|image_pad|>",
        "patch": patch["patch_size"],
        "temporal": settings.get("temporal_patch_size", 2),
        "merge": settings.get("merge_size", 2),
        "min_pixels": settings.get("min_pixels", size.get("shortest_edge", 56 * 56)),
        "max_pixels": settings.get("max_pixels", size.get("longest_edge", 14 * 14 * 4 * 1280)),
    } | _HALF


def _pixtral(config: Settings, settings: Settings) -> dict[str, Any]:
    """Pixtral: a special token ends each line of image rows."""
    vision = config["vision_config"]
    edge = min(settings.get("size", {}).get("longest_edge", 1024), vision["image_size"])
    return {
        "mark": "[IMG]",
        "line_ends": ("[IMG_BREAK]", "[IMG_END]"),
        "patch": vision["patch_size"],
        "merge": config.get("spatial_merge_size", 2) if config["model_type"] == "mistral3" else 1,
        "fit": "edge",
        "edge": edge,
        "max_pixels": edge * edge,
    } | _CLIP


def _gemma3(config: Settings, _: Settings) -> dict[str, Any]:
    """Gemma 3: every picture has a fixed size."""
    vision, text = config["vision_config"], config["text_config"]
    num_rows = text.get("mm_tokens_per_image", 256)  # mlx-vlm's default
    if text.get("sliding_window", 1024) < num_rows:
        raise KeyError("a sliding_window as long as an image")
    side = vision["image_size"] // math.isqrt(num_rows)
    return {
        "mark": "<start_of_image>",
        "text": "\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
        "is_bidirectional": True,
        "patch": vision["patch_size"],
        "merge": side // vision["patch_size"],
        "fit": "square",
        "edge": vision["image_size"],
        "max_pixels": vision["image_size"] ** 2,
        "resample": 2,
    } | _HALF


def _gemma4(config: Settings, settings: Settings) -> dict[str, Any]:
    """Gemma 4: every picture is scaled to about ``max_soft_tokens`` image rows."""
    vision, text = config["vision_config"], config["text_config"]
    pool = settings.get("pooling_kernel_size", vision.get("pooling_kernel_size", 3))
    patch = settings.get("patch_size", vision.get("patch_size", 16))
    num_rows = settings.get("max_soft_tokens", 280)
    is_bidirectional = text.get("use_bidirectional_attention") == "vision"
    if is_bidirectional and text.get("sliding_window", 512) < num_rows:
        raise KeyError("a sliding_window as long as an image")
    return {
        "mark": "<|image|>",
        "text": "<|image><|image|><image|>",
        "is_bidirectional": is_bidirectional,
        "patch": patch,
        "merge": pool,
        "fit": "fill",
        "max_pixels": num_rows * (pool * patch) ** 2,
    }


def _lfm2(config: Settings, settings: Settings) -> dict[str, Any]:
    """LFM2-VL: larger pictures are scaled down, not cut into tiles."""
    read = {**config, **settings}
    side = read.get("encoder_patch_size", 16) * read.get("downsample_factor", 2)
    return {
        "mark": "<image>",
        "text": "<|image_start|><image><|image_end|>",
        "patch": read.get("encoder_patch_size", 16),
        "merge": read.get("downsample_factor", 2),
        "min_pixels": read.get("min_image_tokens", 64) * side * side,
        "max_pixels": read.get("max_image_tokens", 256) * side * side,
    } | _HALF


def _llava(config: Settings, settings: Settings) -> dict[str, Any]:
    """LLaVA 1.5: the middle square of a picture."""
    vision = config["vision_config"]
    if config.get("vision_feature_select_strategy", "default") != "default":
        raise KeyError('vision_feature_select_strategy "default"')
    edge = vision["image_size"]
    return {
        "mark": "<image>",
        "patch": vision["patch_size"],
        "merge": 1,
        "fit": "crop" if settings.get("do_center_crop", True) else "square",
        "edge": edge,
        "max_pixels": edge * edge,
    } | _CLIP


def _idefics3(config: Settings, settings: Settings) -> dict[str, Any]:
    vision = config["vision_config"]
    edge = settings.get("max_image_size", {}).get("longest_edge", vision["image_size"])
    around = "<fake_token_around_image>"
    return {
        "mark": "<image>",
        "text": f"{around}<global-img><image>{around}",
        "patch": vision["patch_size"],
        "merge": config.get("scale_factor", 2),
        "fit": "square",
        "edge": edge,
        "max_pixels": edge * edge,
        "resample": 1,
    } | _HALF


def _merged_patches(rules: ImageRules, values: Floats) -> tuple[Floats, dict[str, Any]]:
    patch, merge = rules.patch, rules.merge
    height, width = values.shape[0] // rules.side, values.shape[1] // rules.side
    squares = values.reshape(height, merge, patch, width, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    repeated = np.repeat(squares[:, :, :, :, :, None], rules.temporal, axis=5)
    made = np.ascontiguousarray(repeated.reshape(height * width * merge**2, -1))
    return made, {"image_grid_thw": mx.array([[1, height * merge, width * merge]])}


def _planes(_: ImageRules, values: Floats) -> tuple[Floats, dict[str, Any]]:
    return np.ascontiguousarray(values.transpose(2, 0, 1)[None]), {"image_sizes": [values.shape[:2]]}


def _lists_of_planes(rules: ImageRules, values: Floats) -> tuple[Floats, dict[str, Any]]:
    return _planes(rules, values)[0][None], {}


def _patch_rows(rules: ImageRules, values: Floats) -> tuple[Floats, dict[str, Any]]:
    patch = rules.patch
    height, width = values.shape[0] // patch, values.shape[1] // patch
    rows = values.reshape(height, patch, width, patch, 3).swapaxes(1, 2).reshape(1, height * width, -1)
    mask = mx.ones((1, height * width), mx.int32)
    return rows, {"spatial_shapes": mx.array([[height, width]]), "pixel_attention_mask": mask}


_QWEN = Family(_qwen, _merged_patches)
FAMILIES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    **dict.fromkeys(("pixtral", "mistral3"), Family(_pixtral, _planes)),
    "gemma3": Family(_gemma3, _planes),
    "gemma4": Family(_gemma4, _planes, scales=True),
    "llava": Family(_llava, _planes),
    "lfm2-vl": Family(_lfm2, _patch_rows),
    **dict.fromkeys(("idefics3", "smolvlm"), Family(_idefics3, _lists_of_planes)),
}
_REFUSED = {
    **dict.fromkeys(
        ("gemma3n", "gemma4_unified"),
        ", whose image rows Octavo does not support yet",
    ),
    "paligemma": ", because mlx-lm has no language model for them",
}
