from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from ..api.errors import ModelLoadError

log = logging.getLogger(__name__)

_LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, or {} without the file. Raises ModelLoadError if it is invalid."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}; download the model again") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def tokenizer_settings(path: Path) -> dict[str, Any]:
    """Return the settings of ``tokenizer_config.json``, ``special_tokens_map.json`` and
    ``added_tokens.json``."""
    settings = read_json(path / "tokenizer_config.json")
    named = {name: value for name, value in read_json(path / "special_tokens_map.json").items() if value}
    if "added_tokens_decoder" in settings:
        settings = named | {name: value for name, value in settings.items() if value is not None}
    else:
        settings |= named
        special = {text for text, _ in _named_tokens(settings)}
        settings["added_tokens_decoder"] = {
            str(index): {"content": text, "special": text in special, "normalized": text not in special}
            for text, index in sorted(_added_tokens(path).items(), key=lambda item: item[1])
        }
    return settings


def _added_tokens(path: Path) -> dict[str, int]:
    file = path / "added_tokens.json"
    found = read_json(file)
    if not all(isinstance(index, int) for index in found.values()):
        raise ModelLoadError(f"{file} must hold an id per token, got {found!r}; download the model again")
    return found


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    for several in map(settings.get, _LISTS):
        named |= several if isinstance(several, dict) else {}
    return {name: text for name, value in named.items() if (text := token_text(value)) is not None}


def token_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def load_backend(path: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer of a folder, with the added tokens of its settings."""
    file = path / "tokenizer.json"
    if not file.exists():
        return _convert_backend(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise ModelLoadError(f"cannot read {file}: {error}; download the model again") from error
    backend.no_truncation()  # training limits would truncate prompts
    backend.no_padding()
    _add_tokens(backend, settings)
    return backend


def _convert_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        from transformers import AutoTokenizer

        backend: object = AutoTokenizer.from_pretrained(str(path)).backend_tokenizer
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelLoadError(
            f"no usable tokenizer in {path}: it has no tokenizer.json, and converting failed ({reason})"
        ) from error
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelLoadError(f"no usable tokenizer in {path}: it has no tokenizer.json")
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for index, token in _declared_tokens(settings):
        if token.content in known:
            continue
        known.add(token.content)
        if index is None and backend.token_to_id(token.content) is None:
            continue
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        got = backend.token_to_id(token.content)
        if index not in (None, got):
            log.warning(
                "token %r has id %s in the tokenizer and %s in its settings", token.content, got, index
            )


def _declared_tokens(settings: Mapping[str, Any]) -> Iterator[tuple[int | None, tokenizers.AddedToken]]:
    declared = settings.get("added_tokens_decoder")
    items = declared.items() if isinstance(declared, dict) else ()
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for key, value in sorted((int(key), value) for key, value in items if str(key).isdecimal()):
        if (text := token_text(value)) is not None:
            chosen = {flag: bool(value[flag]) for flag in flags if isinstance(value, dict) and flag in value}
            yield key, tokenizers.AddedToken(text, **chosen)
    for text, value in _named_tokens(settings):
        chosen = {flag: bool(value[flag]) for flag in flags[:-1] if isinstance(value, dict) and flag in value}
        yield None, tokenizers.AddedToken(text, special=True, **{"normalized": False} | chosen)


def _named_tokens(settings: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    values: list[object] = [value for name, value in settings.items() if name.endswith("_token")]
    for name in _LISTS:
        several = settings.get(name)
        values += (
            several.values() if isinstance(several, dict) else several if isinstance(several, list) else []
        )
    yield from ((text, value) for value in values if (text := token_text(value)))


def find_eos_ids(path: Path, backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> frozenset[int]:
    """Return all end tokens of the generation settings, the configuration and the tokenizer."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        content = read_json(path / name)
        nested = content.get("text_config")
        for source in (content, nested if isinstance(nested, dict) else {}):
            found.update(_token_ids(source.get("eos_token_id"), f"eos_token_id in {path / name}"))
    text = token_text(settings.get("eos_token"))
    if text is not None and (token_id := backend.token_to_id(text)) is not None:
        found.add(token_id)
    return frozenset(found)


def _token_ids(value: object, origin: str) -> Iterable[int]:
    if value is None:
        return ()
    if isinstance(value, list):
        return [each for one in value for each in _token_ids(one, origin)]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ModelLoadError(f"{origin} must be a token id or a list of them, got {value!r}; correct it")
    return (int(value),) if value >= 0 else ()
