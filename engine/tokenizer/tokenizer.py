"""A model's own tokenizer and chat template, read from its folder.

Uses the ``tokenizers`` library directly: importing this module imports neither MLX nor
transformers. Folders without a ``tokenizer.json`` are converted by transformers.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..api.errors import InvalidRequest, ModelLoadError, RequestTooLong
from ..api.prompt import Message
from ..memory.malloc import give_memory_back
from .chat_template import ChatTemplate, load_chat_template
from .detokenizer import Detokenizer
from .text_length import longest_token

LONG_TEXT = 100_000  # characters whose encoding takes memory that is worth giving back, some 15 MB
# A text is encoded on the thread that asks for it, which the scheduler of the machine can see. The library
# reads this each time; it has an effect on whoever else uses the library in this process.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


MAX_EXTRA_TOKENS = 512
"""That one of two tokenizers which are called the same may have behind the other's: markers of its own."""


class Tokenizer:
    """Text to ids and back. Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: frozenset[int] = frozenset(),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        vocab = backend.get_vocab(with_added_tokens=True)
        self.eos_ids = eos_ids
        self.vocab_size = max(vocab.values(), default=-1) + 1
        # One object per id, which prompts share: an object of its own for each token of a thousand
        # prompts that wait is several times the memory of the lists, and is given back last.
        self._ids = list(range(self.vocab_size))
        self.longest_token = longest_token(backend, vocab)

    def difference(self, other: Tokenizer) -> str | None:
        """What ids mean another token there, in words; None if all that both have mean the same."""
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
        """The content of a ``tokenizer.json``, for libraries that read one."""
        return str(self._backend.to_str())

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Ids of ``text``; ``add_special_tokens`` frames it as the model expects (a BOS token, say).

        Other threads go on meanwhile. RequestTooLong, before anything is done, for a text that must
        have more than ``max_tokens`` tokens; one that merely may have more is encoded.
        """
        if max_tokens is not None and len(text) > max_tokens * self.longest_token:
            raise RequestTooLong(
                f"a text of {len(text)} characters has at least {self.at_least(text)} tokens, but at most "
                f"{max_tokens} are allowed here; shorten it"
            )
        # Unlike ``encode``, this one releases the interpreter, and does without offsets into the text.
        try:
            found = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:
            raise InvalidRequest(
                "the text has lone surrogates, which Python makes of bytes that are not UTF-8; convert it"
            ) from None
        ids = list(map(self._ids.__getitem__, found[0].ids))
        if len(text) > LONG_TEXT:
            del found
            give_memory_back()
        return ids

    def at_least(self, text: str) -> int:
        """A number of tokens that the text has at least, known without encoding it."""
        return -(-len(text) // self.longest_token)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, messages: Sequence[Message], *, max_tokens: int | None = None) -> list[int]:
        """Ids of a conversation, ready for the assistant's turn.

        Raises InvalidRequest if the model has no template or the template refuses the messages;
        RequestTooLong, before anything is done, for more than ``max_tokens`` messages, and before
        encoding as ``encode`` does.
        """
        if self._chat_template is None:
            raise InvalidRequest("this model has no chat template; send a plain prompt instead of messages")
        if max_tokens is not None and len(messages) > max_tokens:
            raise RequestTooLong(
                f"a chat of {len(messages)} messages has at least as many tokens, but at most {max_tokens} "
                "are allowed here; leave some out"
            )
        text = self._chat_template.render(messages)
        return self.encode(text, add_special_tokens=False, max_tokens=max_tokens)

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """A fresh stream decoder for what follows the token ids ``context``."""
        return Detokenizer(
            functools.partial(self._backend.decode, skip_special_tokens=True),
            context=context,
            silent_ids=self._special_ids,
        )


def load_tokenizer(path: Path, chat_template: Path | None = None) -> Tokenizer:
    """The tokenizer of the model folder ``path``, with another template if there is one; ModelLoadError says
    what is missing or broken."""
    backend = _load_backend(path)
    settings = read_json(path / "tokenizer_config.json")
    return Tokenizer(
        backend,
        eos_ids=_find_eos_ids(path, backend, settings),
        chat_template=load_chat_template(path, settings, chat_template),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, empty if there is no such file; ModelLoadError if it is broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}; download the model again") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file.exists():
        return _convert_backend(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for any broken content
        raise ModelLoadError(f"cannot read {file}: {error}; download the model again") from error
    backend.no_truncation()  # files made for training may carry limits that would shorten prompts
    backend.no_padding()
    return backend


def _convert_backend(path: Path) -> tokenizers.Tokenizer:
    """What transformers makes of older formats (tokenizer.model, vocab.json and merges.txt)."""
    try:
        from transformers import AutoTokenizer

        backend: object = AutoTokenizer.from_pretrained(str(path)).backend_tokenizer
    except Exception as error:  # whatever its many loaders raise
        reason = str(error).strip().split("\n")[0]
        raise ModelLoadError(
            f"no usable tokenizer in {path}: it has no tokenizer.json, and converting failed ({reason})"
        ) from error
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelLoadError(f"no usable tokenizer in {path}: it has no tokenizer.json")
    return backend


def _find_eos_ids(path: Path, backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> frozenset[int]:
    """Every token that ends an answer, by the model's generation settings, its configuration
    and its tokenizer; they often name different ones, and all of them mean it."""
    config = read_json(path / "config.json")
    text_config = config.get("text_config")
    found: set[int] = set()
    for source in (
        read_json(path / "generation_config.json"),
        config,
        text_config if isinstance(text_config, dict) else {},
    ):
        ids = source.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    token = settings.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str) and (token_id := backend.token_to_id(text)) is not None:
        found.add(token_id)
    return frozenset(found)
