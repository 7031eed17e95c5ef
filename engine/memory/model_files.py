"""Location of a model, and a check that its folder can be read."""

from __future__ import annotations

import functools
import json
import logging
import re
from pathlib import Path
from typing import Any

from ..api.errors import InvalidConfig, ModelLoadError
from .budget import tensors_of
from .configuration import lengths_of, normalized
from .weight_files import indexed_files, weight_files

log = logging.getLogger(__name__)

DEMO = Path(__file__).resolve().parent.parent / "demo"
EMBEDDED = {"demo": DEMO, "demo-hybrid": DEMO.with_name("demo_hybrid")}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_GGUF = re.compile(r"([\w.-]+/[\w.-]+)/([\w./-]+\.gguf)")
_HUB_FILES = ["*.json", "model*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
DEFAULT_MODEL_LEN = 4096


def resolve_model(name: str, revision: str | None = None) -> Path:
    """Return the folder of a model, downloading or converting it if necessary. Raises ModelLoadError.

    name       path of a folder or GGUF file, a Hugging Face id, or a name in ``EMBEDDED``
    revision   revision of a Hugging Face model
    """
    path = EMBEDDED.get(name) or Path(name).expanduser()
    if path.exists() and revision is not None:
        raise InvalidConfig(
            f"revision must come with a Hugging Face id, got {revision!r} for the local model {name!r}; "
            "leave it out"
        )
    if not path.exists():
        if not _HUB_ID.fullmatch(name) and not _HUB_GGUF.fullmatch(name):
            raise ModelLoadError(
                f"model {name!r} does not exist; give 'demo', 'demo-hybrid', a folder, a GGUF file, or a "
                "Hugging Face id such as org/name"
            )
        path = _download(name, revision)
    path = _converted(path)
    if not path.is_dir():
        raise ModelLoadError(
            f"model {name!r} is neither a folder nor a GGUF file; give the folder that holds its config.json"
        )
    read_config(path)
    for file in weight_files(path):
        tensors_of(file)
    return path


def _converted(path: Path) -> Path:
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise ModelLoadError(
                f"{path} must hold one GGUF file, got {', '.join(file.name for file in files)}; give one "
                "of them"
            )
        path = files[0] if files else path
    if path.is_file() and path.suffix == ".gguf":
        from ..gguf import model_folder

        return model_folder(path)
    return path


def served_name(name: str) -> str:
    """Return the model's name for clients, without its path."""
    path = Path(name).expanduser()
    if name in EMBEDDED or not path.exists():
        return name
    path = path.resolve()
    repository = path.parent.parent.name if path.parent.name == "snapshots" else ""
    if repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.stem if path.suffix == ".gguf" else path.name


@functools.lru_cache
def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    gguf = _HUB_GGUF.fullmatch(name)
    try:
        if gguf is not None:
            return Path(hf_hub_download(*gguf.groups(), revision=revision))
        is_silent = not _hub_answers(name, revision)
        fetch = functools.partial(snapshot_download, name, revision=revision, local_files_only=is_silent)
        path = Path(fetch(allow_patterns=_HUB_FILES))
        if is_silent:
            log.warning("%s: Hugging Face does not answer; the cached snapshot %s is used", name, path.name)
        elif absent := [file for file in indexed_files(path) if not (path / file).exists()]:
            path = Path(fetch(allow_patterns=[*_HUB_FILES, *absent]))
        return path
    except EntryNotFoundError as error:
        if isinstance(error, LocalEntryNotFoundError):
            raise _unreachable(name) from error
        raise ModelLoadError(f"model {name!r}: the repository has no such file; check the name") from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(
            f"model {name!r} has no revision {revision!r}; give one of its branches, tags or commits"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelLoadError(
            f"model {name!r} must be a local folder or a Hugging Face repository that you may read; check "
            "the name, or log in"
        ) from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise _unreachable(name) from error


def _hub_answers(name: str, revision: str | None) -> bool:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        HfApi().model_info(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (HfHubHTTPError, OfflineModeIsEnabled):
        return True
    except Exception:
        return False
    return True


def _unreachable(name: str) -> ModelLoadError:
    return ModelLoadError(
        f"model {name!r} is not a local folder, and Hugging Face cannot be reached; check the name, or "
        "download the model and give its folder"
    )


def read_config(path: Path) -> dict[str, Any]:
    """Return the ``normalized`` config.json of the folder. Raises ModelLoadError."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(
            f"{path} has no config.json; give a model folder, which has config.json next to its weights"
        ) from None
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelLoadError(f"{file} has no model_type; give a model's configuration")
    return normalized(config, str(file))


def model_length(
    config: dict[str, Any],
    wanted: int | None,
    *,
    setting: str = "max_model_len",
    max_kv_size: int | None = None,
) -> int:
    """Return the largest length of a sequence in positions. Raises InvalidConfig."""
    lengths = lengths_of(config)
    seen, setting = (wanted, setting) if max_kv_size is None else (max_kv_size, "max_kv_size")
    if seen is not None and lengths is not None and seen > lengths[1]:
        raise InvalidConfig(
            f"{setting} must be at most {lengths[1]}, for which the model was trained, got {seen}; lower it"
        )
    return wanted or (DEFAULT_MODEL_LEN if lengths is None else lengths[0])
