"""Upper bound of the text per token, from a tokenizer's parts.

With it, a text that can never fit is refused before encoding, which takes about 150 bytes per character.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

UNPROVEN_CHARACTERS = 256  # characters per token, assumed if a tokenizer may drop any amount of text

# Largest number of characters that a normalizer joins into one. Compositions join at most four: canonical
# decompositions in Unicode have at most four code points (U+1F82, for example).
_NORMALIZERS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "FixedLength"})
_SPLITTERS = frozenset({"Split", "Punctuation"})  # unless they remove the separators
_MAX_SHRINKING = 64


def longest_token(backend: tokenizers.Tokenizer, vocab: Mapping[str, int]) -> int:
    """Return the maximum number of characters per token, on average over any text."""
    longest = max(map(len, vocab), default=1)
    normalizers, pre_tokenizers = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
    shrinking = _shrinking(normalizers)
    added = backend.get_added_tokens_decoder().values()
    proven = (
        shrinking is not None
        and all(map(_keeps_text, pre_tokenizers))
        and _covers_text(backend.model, vocab, [*normalizers, *pre_tokenizers])
        and not any(token.lstrip or token.rstrip for token in added)  # these remove adjacent spaces
    )
    if proven and shrinking is not None:
        return longest * shrinking
    return max(longest, UNPROVEN_CHARACTERS)


def _parts(component: Any) -> list[dict[str, Any]]:
    """Return the settings of a normalizer or pre-tokenizer, with sequences flattened."""
    if component is None:
        return []
    return list(_flattened(json.loads(component.__getstate__())))


def _flattened(part: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if part.get("type") != "Sequence":
        return [part]
    inner = part.get("normalizers") or part.get("pretokenizers") or []
    return [leaf for each in inner for leaf in _flattened(each)]


def _shrinking(normalizers: list[dict[str, Any]]) -> int | None:
    """Return how many characters may become one; None if unknown."""
    found = 1
    for part in normalizers:
        kind = part.get("type")
        if kind == "Replace":
            pattern, content = part.get("pattern", {}).get("String"), part.get("content", "")
            if pattern is None or not content:
                return None
            found *= -(-len(pattern) // len(content))
        elif kind in _NORMALIZERS:
            found *= _NORMALIZERS[kind]
        else:
            return None
    return found if found <= _MAX_SHRINKING else None


def _keeps_text(pre_tokenizer: dict[str, Any]) -> bool:
    kind = pre_tokenizer.get("type")
    return kind in _PRE_TOKENIZERS or (kind in _SPLITTERS and pre_tokenizer.get("behavior") != "Removed")


def _covers_text(model: Any, vocab: Mapping[str, int], parts: list[dict[str, Any]]) -> bool:
    """Whether every character has a token, and none is shared by a run of unknown ones."""
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if any(part.get("type") == "ByteLevel" for part in parts):
        return all(letter in vocab for letter in tokenizers.pre_tokenizers.ByteLevel.alphabet())
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    return model.unk_token is not None and model.unk_token in vocab and not model.fuse_unk
