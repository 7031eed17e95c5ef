from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from ..api.errors import InvalidRequest
from .library import first_line, make_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from ..tokenizer.tokenizer import Tokenizer


class LibraryTokenizer(NamedTuple):
    """llguidance's tokenizer, and the arguments with which a helper process makes it, too."""

    made: LLTokenizer
    setup: dict[str, Any]


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
            setup: dict[str, Any] = {
                "serialized": self._source.serialized(),
                "num_tokens": self._num_tokens,
                "end_ids": self._end_ids,
            }
            return LibraryTokenizer(make_tokenizer(**setup), setup)
        except BaseException as error:  # the library raises ValueError or panics
            raise InvalidRequest(
                f"structured output is not possible with this model's tokenizer: {first_line(str(error))}; "
                "leave structured output out"
            ) from error
