"""Tokenizer and chat template of a model folder.

Importing this module imports neither MLX nor transformers. Folders without ``tokenizer.json`` are
converted by transformers.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..api.errors import InvalidRequest, RequestTooLong
from ..api.prompt import ChatPrompt, Message
from ..chat.chat_format import AUTO, ChatFormat, chat_format_of
from ..memory.malloc import give_memory_back
from .chat_template import ChatTemplate, load_chat_template
from .detokenizer import Detokenizer, StopChecker
from .folder_files import find_eos_ids, load_backend, tokenizer_settings

LONG_TEXT = 100_000  # characters; longer texts need much memory
# Encode on the calling thread only.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


TAIL_TOKENS = 24
TOKEN_CHARACTERS = 256  # text of one token at most: normalizers join characters, pre-tokenizers drop some
MAX_EXTRA_TOKENS = 512
"""Largest number of additional tokens, such as markers, in one of two tokenizers that count as the same."""


class Tokenizer:
    """Conversion between text and ids. Thread-safe."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: frozenset[int] = frozenset(),
        chat_template: ChatTemplate | None = None,
        reasoning_parser: str = AUTO,
        tool_call_parser: str = AUTO,
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.shows_tools = chat_template is not None and "tools" in chat_template.source
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._shown = {id: self._added[id] for id in self._special_ids if id not in eos_ids}
        vocab = backend.get_vocab(with_added_tokens=True)
        self.eos_ids = eos_ids
        self.chat_format: ChatFormat = chat_format_of(
            "" if chat_template is None else chat_template.source,
            vocab,
            reasoning_parser=reasoning_parser,
            tool_call_parser=tool_call_parser,
        )
        self.vocab_size = max(vocab.values(), default=-1) + 1
        # Share one int object per token id, to save memory with many waiting prompts.
        self._ids = list(range(self.vocab_size))
        self.longest_token = max(TOKEN_CHARACTERS, max(map(len, vocab), default=0))
        self._piece_bytes = piece_decoder(backend)

    def difference(self, other: Tokenizer) -> str | None:
        """Return how the vocabulary of ``other`` differs, or None."""
        mine, theirs = (
            {id: token for token, id in each._backend.get_vocab(with_added_tokens=True).items()}
            for each in (self, other)
        )
        for id in sorted(mine.keys() & theirs.keys()):
            if mine[id] != theirs[id]:
                return f"token {id} is {theirs[id]!r} and not {mine[id]!r}"
        if abs(len(mine) - len(theirs)) > MAX_EXTRA_TOKENS:
            return f"it has {len(theirs)} tokens and not {len(mine)}"
        return None

    def serialized(self) -> str:
        return str(self._backend.to_str())

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of ``text``. Raises RequestTooLong if it certainly exceeds ``max_tokens``."""
        if max_tokens is not None and len(text) > max_tokens * self.longest_token:
            raise RequestTooLong(
                f"a text of {len(text)} characters has at least {self.min_tokens(text)} tokens, but at most "
                f"{max_tokens} are allowed; shorten it"
            )
        try:
            found = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:
            raise InvalidRequest(
                "the text must be valid Unicode, got lone surrogates (bytes that were not UTF-8); convert it"
            ) from None
        ids = list(map(self._ids.__getitem__, found[0].ids))
        if len(text) > LONG_TEXT:
            del found
            give_memory_back()
        return ids

    def min_tokens(self, text: str) -> int:
        """Return a lower bound for the number of tokens, without encoding."""
        return -(-len(text) // self.longest_token)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def piece(self, token_id: int) -> str:
        """Return the vocabulary's spelling of a token; "" for unknown ids."""
        return self._backend.id_to_token(token_id) or ""

    def bytes_of(self, token_id: int) -> bytes | None:
        if token_id in self._special_ids or not (piece := self.piece(token_id)):
            return None
        return self._piece_bytes(piece)

    def apply_chat_template(
        self,
        chat: ChatPrompt | Sequence[Message],
        *,
        max_tokens: int | None = None,
        replaced: tuple[str, str] = ("", ""),
    ) -> list[int]:
        """Return the token ids of a conversation. Raises InvalidRequest if the template rejects it, and
        RequestTooLong for more than ``max_tokens``."""
        if self._chat_template is None:
            raise InvalidRequest("this model has no chat template; send a plain prompt instead of messages")
        chat = chat if isinstance(chat, ChatPrompt) else ChatPrompt(chat)
        if max_tokens is not None and len(chat.messages) > max_tokens:
            raise RequestTooLong(
                f"a chat of {len(chat.messages)} messages has at least that many tokens, but at most "
                f"{max_tokens} are allowed; leave out some messages"
            )
        text = self._chat_template.render(chat)
        if replaced[0]:
            text = text.replace(*replaced)
        return self.encode(text, add_special_tokens=False, max_tokens=max_tokens)

    def prompt_tail(self, prompt_ids: Sequence[int]) -> str:
        """Return the text of the last prompt tokens, including special tokens."""
        known = [token for token in prompt_ids[-TAIL_TOKENS:] if token < self.vocab_size]
        return self.decode(known, skip_special_tokens=False)

    def is_added(self, token_id: int) -> bool:
        return token_id in self._added

    def added_id(self, text: str) -> int | None:
        return next((token_id for token_id, token in self._added.items() if token == text), None)

    def detokenizer(self, context: Sequence[int] = (), *, shows_special: bool = False) -> Detokenizer:
        """Return a detokenizer for output after ``context``."""
        return Detokenizer(
            functools.partial(self._backend.decode, skip_special_tokens=True),
            context=context,
            silent_ids=self._special_ids,
            shown=self._shown if shows_special else {},
        )

    def ids_of_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each word, without and with a leading space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare, spaced = (
                tuple(self.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
            )
            found[bare] = None
            if spaced[-len(bare) :] != bare:
                found[spaced] = None
        return tuple(filter(None, found))

    def stop_checker(self, stops: Sequence[str], *, shows_match: bool = False) -> StopChecker:
        """Return a checker for stop strings."""
        markers: dict[int, str] = {}

        def marked(found: re.Match[str]) -> str:
            # Lone surrogates never occur in decoded text, so they can represent tokens.
            return markers.setdefault(self._special_texts[found[0]], chr(0xD800 + len(markers)))

        forms = {self._special_pattern.sub(marked, stop): stop for stop in stops} if stops else {}
        return StopChecker(
            stops,
            forms={form: stop for form, stop in forms.items() if form != stop},
            markers=markers,
            shows_match=shows_match,
        )

    @functools.cached_property
    def _special_texts(self) -> dict[str, int]:
        added = self._backend.get_added_tokens_decoder()
        return {added[token_id].content: token_id for token_id in self._special_ids}

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        texts = sorted(filter(None, self._special_texts), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def check_parsers(reasoning_parser: str, tool_call_parser: str) -> None:
    """Raise InvalidConfig for unknown parsers."""
    chat_format_of("", {}, reasoning_parser=reasoning_parser, tool_call_parser=tool_call_parser)


def load_tokenizer(
    path: Path,
    chat_template: Path | None = None,
    *,
    reasoning_parser: str = AUTO,
    tool_call_parser: str = AUTO,
) -> Tokenizer:
    """Load a model's tokenizer. Raises ModelLoadError for missing or damaged files, and InvalidConfig for
    unknown parsers."""
    settings = tokenizer_settings(path)
    backend = load_backend(path, settings)
    return Tokenizer(
        backend,
        eos_ids=find_eos_ids(path, backend, settings),
        chat_template=load_chat_template(path, settings, chat_template),
        reasoning_parser=reasoning_parser,
        tool_call_parser=tool_call_parser,
    )


_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return the printable characters for the 256 bytes in ByteLevel tokenizers (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def piece_decoder(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Return a function from a token's spelling to its bytes."""
    steps = _parts(backend.decoder)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()

        def of_bytes(piece: str) -> bytes:
            if all(character in alphabet for character in piece):
                return bytes(alphabet[character] for character in piece)
            return piece.encode(errors="replace")

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


def _parts(component: Any) -> list[dict[str, Any]]:
    if component is None:
        return []
    return list(_flattened(json.loads(component.__getstate__())))


def _flattened(part: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if part.get("type") != "Sequence":
        return [part]
    inner = part.get("normalizers") or part.get("pretokenizers") or part.get("decoders") or []
    return [leaf for each in inner for leaf in _flattened(each)]
