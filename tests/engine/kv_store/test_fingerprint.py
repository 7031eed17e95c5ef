from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.engine.kv_store import fingerprint
from octavo.engine.kv_store.fingerprint import model_fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    rows = np.random.default_rng(0).integers(0, 255, (2000, 64), np.uint8)
    save_file({"embedding": rows}, folder / "model.safetensors")
    return folder


def name(model: Path, tmp_path: Path, *, weights: str = "bf16", exact: bool = False) -> str:
    return model_fingerprint(
        model, weights=weights, exact=exact, remembered=tmp_path / "known" / "digests.json"
    )


def test_one_edited_row_in_the_middle_is_another_model(model: Path, tmp_path: Path) -> None:
    before = name(model, tmp_path)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(64_000)
        file.write(b"\0" * 64)
    assert name(model, tmp_path) != before


def test_an_edit_that_hides_its_time_is_seen(model: Path, tmp_path: Path) -> None:
    before, file = name(model, tmp_path), model / "model.safetensors"
    status = file.stat()
    raw = bytearray(file.read_bytes())
    raw[70_000] ^= 1
    file.write_bytes(raw)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert name(model, tmp_path) != before


def test_unchanged_files_are_hashed_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = name(model, tmp_path)
    known = tmp_path / "known" / "digests.json"
    assert stat.S_IMODE(known.stat().st_mode) == 0o600

    def read_again(file: Path) -> str:
        raise AssertionError(f"{file} was read again")

    monkeypatch.setattr(fingerprint, "_hash_file", read_again)
    assert name(model, tmp_path) == before
    assert name(model, tmp_path, weights="int8") != before
    assert name(model, tmp_path, exact=True) != before


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '{"a": [1, 2]}'])
def test_a_damaged_memory_is_none(model: Path, tmp_path: Path, text: str) -> None:
    before, known = name(model, tmp_path), tmp_path / "known" / "digests.json"
    known.write_text(text)
    assert name(model, tmp_path) == before
    assert "model.safetensors" in known.read_text()


def test_chunks_cover_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "CHUNK_BYTES", 10)
    file, seen = tmp_path / "x", set()
    for position in range(35):
        raw = bytearray(35)
        raw[position] = 1
        file.write_bytes(raw)
        seen.add(fingerprint._hash_file(file))
    assert len(seen) == 35
