"""Tokens for responses with log probabilities: their text and bytes."""

from __future__ import annotations

from typing import NamedTuple

from ..tokenizer.tokenizer import Tokenizer

MAX_KEPT = 65_536  # tokens whose text is cached


class TokenText(NamedTuple):
    """A token's text and bytes; ``data`` is None for special tokens, which the text leaves out."""

    text: str
    data: bytes | None

    @property
    def escaped(self) -> str:
        r"""The text; bytes that are not characters by themselves are written as ``bytes:\xf0\x9f``."""
        if self.data is None or "\N{REPLACEMENT CHARACTER}" not in self.text:
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


class TokenTexts:
    """The texts of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}

    def of(self, token_id: int) -> TokenText:
        if (known := self._known.get(token_id)) is None:
            data = self._tokenizer.bytes_of(token_id)
            text = self._tokenizer.piece(token_id) if data is None else data.decode(errors="replace")
            known = TokenText(text, data)
            if len(self._known) < MAX_KEPT:
                self._known[token_id] = known
        return known
