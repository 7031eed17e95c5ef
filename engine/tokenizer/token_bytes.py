"""Bytes of single tokens, which form the text when joined, even if tokens split characters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return the printable stand-ins of ByteLevel tokenizers for the 256 bytes (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def piece_decoder(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Return a function from a token, as the vocabulary spells it, to its bytes within a text."""
    steps = list(_steps(None if backend.decoder is None else json.loads(backend.decoder.__getstate__())))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()

        def of_bytes(piece: str) -> bytes:
            if all(character in alphabet for character in piece):
                return bytes(alphabet[character] for character in piece)
            return piece.encode(errors="replace")  # an added token, with its literal text

        return of_bytes
    replaced = [
        (step["pattern"]["String"], step["content"])
        for step in steps
        if step["type"] == "Replace" and "String" in step["pattern"]
    ]
    replaced += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    prefixes = [step["prefix"] for step in steps if step["type"] == "WordPiece"]

    def of_text(piece: str) -> bytes:
        if "ByteFallback" in kinds and (found := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(found[1], 16)])
        for before, after in replaced:
            piece = piece.replace(before, after)
        for prefix in prefixes:
            piece = piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}"
        return piece.encode(errors="replace")

    return of_text


def _steps(decoder: Any) -> Iterator[dict[str, Any]]:
    """Yield the decoders of which a decoder consists."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder
