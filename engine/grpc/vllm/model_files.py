"""Model files for routers: tokenizer files as a zip, and default sampling parameters."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...api.sampling_params import PARAMETERS
from ...tokenizer.folder_files import read_json

CHUNK_BYTES = 64 * 2**10
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt",
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
_SAMPLING = tuple(name for name, (declared, _) in PARAMETERS.items() if declared.recommended)
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)  # a fixed time makes archives reproducible


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Architectures in config.json, and sampling parameters in generation_config.json."""

    path: Path
    architectures: tuple[str, ...] = ()
    model_type: str = ""
    pad_token_id: int = 0
    bos_token_id: int = 0
    sampling: dict[str, float]

    @property
    def temperature(self) -> float:
        """Default temperature: the model's recommendation, or 1 as in vLLM."""
        return float(self.sampling.get("temperature", 1.0))

    @property
    def sampling_json(self) -> str:
        return json.dumps(self.sampling, separators=(",", ":")) if self.sampling else ""


def read_model_files(path: Path) -> ModelFiles:
    """Read a model's folder. Raises ModelLoadError for a damaged file."""
    config = read_json(path / "config.json")
    generation = read_json(path / "generation_config.json")
    names = config.get("architectures")
    return ModelFiles(
        path=path,
        architectures=tuple(map(str, names)) if isinstance(names, list) else (),
        model_type=str(config.get("model_type", "")),
        pad_token_id=_first_id(config.get("pad_token_id")),
        bos_token_id=_first_id(config.get("bos_token_id")),
        sampling={
            name: value for name in _SAMPLING if isinstance(value := generation.get(name), int | float)
        },
    )


def _first_id(value: Any) -> int:
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, int) else 0


def tokenizer_zip(path: Path, chat_template: Path | None = None) -> bytes:
    """Return a zip of the tokenizer files; b"" if there are none."""
    files = {name: path / name for name in TOKENIZER_FILES if (path / name).is_file()}
    if not files:
        return b""
    if chat_template is not None:
        files = {name: file for name, file in files.items() if name != "chat_template.json"}
        files["chat_template.jinja"] = chat_template  # takes precedence over tokenizer_config.json
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, file in files.items():
            entry = zipfile.ZipInfo(name, date_time=_ZIP_EPOCH)
            archive.writestr(entry, file.read_bytes(), compress_type=zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def chunks(data: bytes) -> Iterator[tuple[bytes, str]]:
    """Yield pieces of the data. The last piece has the SHA-256 of all data."""
    for start in range(0, len(data), CHUNK_BYTES):
        end = start + CHUNK_BYTES
        yield data[start:end], hashlib.sha256(data).hexdigest() if end >= len(data) else ""
