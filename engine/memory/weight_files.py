from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath

from ..api.errors import ModelLoadError

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_OTHER_FORMATS = ("*.bin", "*.pth", "*.pt", "*.gguf", "*.npz", "*.h5", "*.msgpack")


def weight_files(path: Path) -> list[Path]:
    """Return the weight files: those in the index, else ``model.safetensors`` or all shards.

    A stale index is ignored, as in transformers. Raises ModelLoadError for a missing file.
    """
    whole = path / WHOLE
    named = indexed_files(path)
    if whole.exists() and WHOLE not in named:
        return [whole, *([] if named else _unlisted_files(path))]
    missing = [name for name in named if not (path / name).exists()]
    if named and not missing:
        return [path / name for name in named]
    sets = _numbered(path)
    complete = [files for count, files in sets.items() if len(files) == count]
    if len(complete) == 1:
        return complete[0] + ([] if named else _unlisted_files(path))
    if missing:
        raise ModelLoadError(
            f"{path} lacks {_listed(missing)}, which {INDEX} lists; download the model again, or copy it"
        )
    if complete:
        raise ModelLoadError(
            f"{path} has {len(complete)} complete sets of weight files and no {INDEX} to choose one; "
            "remove the sets that you do not need"
        )
    for count, files in sets.items():
        prefix, _, digits = _parts(files[0])
        have = {_parts(file)[1] for file in files}
        lacking = [
            f"{prefix}-{number:05}-of-{digits}.safetensors"
            for number in range(1, count + 1)
            if number not in have
        ]
        raise ModelLoadError(f"{path} lacks {_listed(lacking)}; download the model again, or copy the file")
    if files := _unlisted_files(path):
        return files
    others = [file.name for kind in _OTHER_FORMATS for file in sorted(path.glob(kind))]
    instead = f" but {_listed(others)} in an unsupported format" if others else ""
    raise ModelLoadError(
        f"{path} has no model*.safetensors file{instead}; "
        "give a folder with config.json, weights and a tokenizer"
    )


def indexed_files(path: Path) -> list[str]:
    """Return the names of the files in the folder's index; empty without an index."""
    file = path / INDEX
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        names = sorted(set(content["weight_map"].values()))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if (path / WHOLE).exists():
            return []
        raise ModelLoadError(f"{file} is damaged: {error}; download the model again") from error
    for name in names:
        inside = isinstance(name, str) and PurePosixPath(name)
        if not inside or inside.is_absolute() or ".." in inside.parts:
            raise ModelLoadError(f"{file} must name files of the same folder, got {name!r}; correct it")
    return names


def _numbered(path: Path) -> dict[int, list[Path]]:
    sets: dict[int, list[Path]] = {}
    for file in sorted(path.glob("model*.safetensors")):
        if _SHARD.fullmatch(file.name):
            sets.setdefault(int(_parts(file)[2]), []).append(file)
    return sets


def _parts(file: Path) -> tuple[str, int, str]:
    match = _SHARD.fullmatch(file.name)
    assert match is not None
    return match[1], int(match[2]), match[3]


def _unlisted_files(path: Path) -> list[Path]:
    files = sorted(path.glob("model*.safetensors"))
    return [file for file in files if file.name != WHOLE and not _SHARD.fullmatch(file.name)]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
