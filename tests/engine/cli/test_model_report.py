from __future__ import annotations

from pathlib import Path

import pytest

import recurrent_models
from native import require_extension
from octavo.engine.api.config import EngineConfig
from octavo.engine.cli.model_report import examine_model, model_lines

require_extension()


@pytest.mark.parametrize(
    ("name", "backend", "recurrences", "kept"),
    [
        ("qwen3_5", "cpu", {"gated_delta_update": (3, 0), "convolution": (3, 0)}, set()),
        ("qwen3_5", "reference", {"gated_delta_update": (0, 3), "convolution": (0, 3)}, set()),
        ("lfm2", "cpu", {"convolution": (2, 0)}, set()),
        ("rwkv7", "cpu", {"_wkv7": (3, 0), "token shift": (6, 0)}, set()),
        ("baichuan_m1", "cpu", {"mixing of heads": (8, 0)}, set()),
    ],
)
@pytest.mark.few(2)
def test_the_doctor_reports_the_kernels_of_recurrences(
    name: str, backend: str, recurrences: dict[str, tuple[int, int]], kept: set[str], tmp_path: Path
) -> None:
    folder = recurrent_models.make_folder(tmp_path / name, name)
    config = EngineConfig(model=str(folder), backend=backend)  # type: ignore[arg-type]
    report = examine_model(config)
    assert report["recurrences"] == {
        cut: {"native": native, "mlx": mlx} for cut, (native, mlx) in recurrences.items()
    }
    assert kept <= {entry["type"] for entry in report["kept"]}
    for entry in report["kept"]:
        assert entry["type"] != "Conv1d" or recurrences["convolution"][1], "a kernel computes it"
    lines = "\n".join(model_lines(report))
    for cut, (native, mlx) in recurrences.items():
        assert f"{cut}: {native} by a native kernel" in lines or not native
        assert f"{mlx} by mlx-lm's operations" in lines or not mlx


def test_a_model_without_recurrent_layers_has_none() -> None:
    report = examine_model(EngineConfig(model="demo"))
    assert report["recurrences"] == {}
    assert not any("native kernel" in line and "computed by MLX" not in line for line in model_lines(report))
