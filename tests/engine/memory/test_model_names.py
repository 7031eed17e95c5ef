from __future__ import annotations

from pathlib import Path

import pytest

from octavo.engine.memory.model_files import served_name


def test_a_folder_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "secret" / "Qwen3-0.6B"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(folder)
    for name in (str(folder), f"{folder}/", "~/secret/Qwen3-0.6B", ".", "../Qwen3-0.6B", str(folder / "..")):
        expected = "secret" if name.endswith("..") else "Qwen3-0.6B"
        assert served_name(name) == expected


def test_a_snapshot_of_the_hubs_cache_is_known_by_its_id(tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de2"
    folder.mkdir(parents=True)
    assert served_name(str(folder)) == "Qwen/Qwen3-0.6B"


def test_other_names_stay_as_they_are() -> None:
    for name in ("demo", "Qwen/Qwen3-0.6B"):
        assert served_name(name) == name
