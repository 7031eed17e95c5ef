from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..api.errors import InvalidRequest
from .library import first_line, make_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from ..tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenizerText:
    serialized: str
    num_tokens: int
    end_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LibraryTokenizer:
    text: TokenizerText
    made: LLTokenizer


class TokenizerMaker:
    """Builds llguidance's tokenizer at the first use. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        self._source = tokenizer
        self._num_tokens = max(vocab_size, tokenizer.vocab_size)
        self._end_ids = end_ids
        self._made: LibraryTokenizer | None = None
        self._lock = threading.Lock()

    def get(self) -> LibraryTokenizer:
        """Return the tokenizer. Raises InvalidRequest for unsupported models."""
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> LibraryTokenizer:
        if not self._end_ids:
            raise InvalidRequest(
                "structured output needs a model with an end token; ask this model for plain text"
            )
        try:
            text = TokenizerText(self._source.serialized(), self._num_tokens, self._end_ids)
            made = make_tokenizer(text.serialized, num_tokens=text.num_tokens, end_ids=text.end_ids)
        except BaseException as error:  # the library raises ValueError or panics
            raise InvalidRequest(
                f"structured output is not possible with this model's tokenizer: {first_line(str(error))}; "
                "leave structured output out"
            ) from error
        return LibraryTokenizer(text, made)
