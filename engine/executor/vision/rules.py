"""The rules by which a model's images become rows, read from its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...api.errors import InvalidConfig, ModelLoadError
from ...api.image import ImageRules

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
SEES_ITSELF = ("gemma3", "gemma3n", "gemma4", "gemma4_unified", "paligemma")  # bidirectional rows of an image
MARK = "<|image_pad|>"
_DEFAULTS: Mapping[str, Any] = {  # defaults of Qwen's processors for missing settings
    "temporal_patch_size": 2, "merge_size": 2, "image_mean": (0.5,) * 3, "image_std": (0.5,) * 3,
    "min_pixels": 56 * 56, "max_pixels": 14 * 14 * 4 * 1280,
}  # fmt: skip


def read_rules(path: Path, config: Mapping[str, Any], *, max_pixels: int) -> ImageRules:
    """Return the image rules of the model folder ``path``. Raises InvalidConfig for a model whose images
    cannot be served, ModelLoadError for missing or unknown settings."""
    family = config["model_type"]
    if family not in FAMILIES or "vision_config" not in config:
        why = "whose image rows see each other, which no backend computes" if family in SEES_ITSELF else ""
        raise InvalidConfig(
            f"vision must be left out for {family} models{f', {why}' if why else ''}; images are served for "
            f"{', '.join(FAMILIES)}, where config.json has a vision_config"
        )
    settings = {**_DEFAULTS, **_settings(path)}
    patch = settings.get("patch_size", config["vision_config"].get("patch_size"))
    if not settings.get("do_normalize", True) or settings.get("rescale_factor", 1 / 255) != 1 / 255:
        raise ModelLoadError(
            f"{path} must rescale pixels by 1/255 and normalize them; serve it without vision"
        )
    if not isinstance(patch, int) or not isinstance(token := config.get("image_token_id"), int):
        raise ModelLoadError(f"{path} must say patch_size and image_token_id; serve it without vision")
    side = patch * settings["merge_size"]
    return ImageRules(
        token=token,
        mark=MARK,
        patch=patch,
        temporal=settings["temporal_patch_size"],
        merge=settings["merge_size"],
        min_pixels=settings["min_pixels"],
        max_pixels=max(side * side, min(settings["max_pixels"], max_pixels)),
        mean=tuple(settings["image_mean"]),
        std=tuple(settings["image_std"]),
    )


def _settings(path: Path) -> dict[str, Any]:
    """Return the image processor's settings, with pixel limits under one name."""
    found: dict[str, Any] = {}
    for name, key in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        if (file := path / name).exists():
            try:
                read = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ModelLoadError(f"{file} cannot be read: {error}") from error
            found |= (read if key is None else read.get(key)) or {}
    size = found.get("size") or {}
    for ours, theirs in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        found.setdefault(ours, size.get(theirs))
    return {name: value for name, value in found.items() if value is not None}
