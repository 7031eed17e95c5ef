from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.engine.api.errors import InvalidConfig
from octavo.engine.api.image import Size
from octavo.engine.executor.vision.families import read_rules

PARTS: dict[str, Any] = {"vision_config": {"image_size": 384, "patch_size": 16}, "image_token_id": 7}


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma3n", "image rows Octavo does not support yet"),
        ("gemma4_unified", "image rows Octavo does not support yet"),
        ("paligemma", "mlx-lm has no language model"),
        ("llama", "images are supported for .*smolvlm"),
    ],
)
def test_other_families_are_refused_by_name(family: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=f"vision must be left out for {family} models.*{reason}"):
        read_rules(tmp_path, PARTS | {"model_type": family}, max_pixels=2**20)


def test_pictures_of_smolvlm_become_one_square(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"max_image_size": {"longest_edge": 512}}')
    rules = read_rules(tmp_path, PARTS | {"model_type": "smolvlm", "scale_factor": 4}, max_pixels=2**20)
    assert rules.size_for(Size(3000, 200)) == (512, 512)
    assert (512 // rules.side) ** 2 == 64, "its processor's image_seq_len"
