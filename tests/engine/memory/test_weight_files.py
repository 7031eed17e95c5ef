from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.engine.api.errors import ModelLoadError
from octavo.engine.memory.weight_files import weight_files

TWO = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
THREE = tuple(f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3))


def make(folder: Path, files: tuple[str, ...], index: tuple[str, ...] = ()) -> Path:
    for name in files:
        (folder / name).touch()
    if index:
        content = {"weight_map": {f"tensor{number}": name for number, name in enumerate(index)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("files", "index", "read"),
    [
        (("model.safetensors",), (), ("model.safetensors",)),
        (TWO, TWO, TWO),
        (TWO, (), TWO),
        ((*TWO, "model-extra.safetensors"), TWO, TWO),  # only files that the index names
        ((*TWO, *THREE[:2]), TWO, TWO),
        ((*TWO, THREE[2]), (), TWO),  # left over from another layout
        (("model.safetensors", *TWO), TWO, ("model.safetensors",)),  # as transformers reads it
        (("model.safetensors",), THREE, ("model.safetensors",)),  # a stale index
        (TWO, THREE, TWO),
        (("model.safetensors", TWO[0]), (), ("model.safetensors",)),
        (("model.safetensors", "model-mtp.safetensors"), (), ("model.safetensors", "model-mtp.safetensors")),
        (("model.safetensors", "mtp.safetensors"), ("model.safetensors", "mtp.safetensors"), None),
        (("weights.0.safetensors",), ("weights.0.safetensors",), None),  # any name that is in the index
    ],
)
def test_the_files_of_a_folder(
    tmp_path: Path, files: tuple[str, ...], index: tuple[str, ...], read: tuple[str, ...] | None
) -> None:
    found = [file.name for file in weight_files(make(tmp_path, files, index))]
    assert found == list(read or index)


@pytest.mark.parametrize(
    ("files", "index", "named"),
    [
        (TWO[:1], TWO, f"lacks {TWO[1]}, which model.safetensors.index.json lists"),
        (TWO[:1], (), f"lacks {TWO[1]}; download"),
        ((), THREE, f"lacks {', '.join(THREE)}, which"),
        ((*TWO, *THREE), (), "2 complete sets of weight files"),
        ((), ("../weights.safetensors",), "files of the same folder"),
        (("pytorch_model.bin",), (), "but pytorch_model.bin in an unsupported format"),
        ((), (), r"no model\*\.safetensors file; give a folder with"),
    ],
)
def test_missing_files_are_named(
    tmp_path: Path, files: tuple[str, ...], index: tuple[str, ...], named: str
) -> None:
    with pytest.raises(ModelLoadError, match=named):
        weight_files(make(tmp_path, files, index))


def test_a_broken_index_is_refused_unless_all_is_in_one_file(tmp_path: Path) -> None:
    make(tmp_path, TWO)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelLoadError, match="is damaged"):
        weight_files(tmp_path)
    make(tmp_path, ("model.safetensors",))
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]
