from __future__ import annotations

import codecs
from typing import Any, NamedTuple

from ..api.outputs import Delta, PromptLogprobs, TokenLogprob
from ..api.sampling_params import SamplingParams
from ..tokenizer.tokenizer import Tokenizer
from .exchange import json_list, json_of

MAX_KEPT = 65_536


class TokenText(NamedTuple):
    """Text and bytes of a token. ``data`` is None for special tokens."""

    text: str
    data: bytes | None

    @property
    def escaped(self) -> str:
        r"""The text, or ``bytes:\xf0\x9f`` for a token that is only part of a character."""
        if self.data is None or "\N{REPLACEMENT CHARACTER}" not in self.text:
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


class TokenTexts:
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


def shown_logprobs(delta: Delta, params: SamplingParams) -> tuple[TokenLogprob, ...]:
    ended_by_token = bool(delta.token_ids) and delta.stop_match == delta.token_ids[-1]
    ended_by_token = ended_by_token and not params.include_stop_str_in_output
    return delta.logprobs[:-1] if ended_by_token else delta.logprobs


def chat_logprobs(
    entries: tuple[TokenLogprob, ...], texts: TokenTexts, top: int, *, as_ids: bool = False
) -> bytes:
    """Return log probabilities in OpenAI's chat format, as JSON."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        text = texts.of(token_id)
        data = None if text.data is None else list(text.data)
        return {
            "token": f"token_id:{token_id}" if as_ids else text.text,
            "logprob": logprob,
            "bytes": data,
        }

    def written(entry: TokenLogprob) -> bytes:
        likeliest = [shown(token, logprob) for token, logprob in entry.top[:top]]
        return json_of(shown(entry.token_id, entry.logprob) | {"top_logprobs": likeliest})

    return b'{"content":%b,"refusal":null}' % json_list(map(written, entries))


class CompletionLogprobWriter:
    """Writes the log probabilities of one sample, with offsets into its text."""

    def __init__(self, texts: TokenTexts, top: int, *, as_ids: bool = False) -> None:
        self._texts = texts
        self._top = top
        self._as_ids = as_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(
        self, entries: tuple[TokenLogprob, ...], prompt: PromptLogprobs | None = None
    ) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        if prompt is not None:
            self._add(found, prompt.first_id, None, None)
            entries = (*prompt.rest, *entries)
        for entry in entries:
            top = {self._shown(token): logprob for token, logprob in entry.top[: self._top]}
            top.setdefault(self._shown(entry.token_id), entry.logprob)
            self._add(found, entry.token_id, entry.logprob, top)
        return found

    def _add(self, found: dict[str, list[Any]], token_id: int, logprob: float | None, top: Any) -> None:
        found["tokens"].append(self._shown(token_id))
        found["token_logprobs"].append(logprob)
        found["top_logprobs"].append(top)
        found["text_offset"].append(self._offset)
        self._offset += len(self._decoder.decode(self._texts.of(token_id).data or b""))

    def _shown(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._texts.of(token_id).escaped


def prompt_entries(found: PromptLogprobs, texts: TokenTexts) -> bytes:
    """Return the log probabilities of a prompt in vLLM's format, as JSON. The first token has null."""
    rows = [b"null"]
    for entry in found.rest:
        row: dict[str, dict[str, Any]] = {}
        for rank, (token, logprob) in enumerate(entry.top, 1):
            row[str(token)] = {"logprob": logprob, "rank": rank, "decoded_token": texts.of(token).text}
        if str(entry.token_id) not in row:
            text = texts.of(entry.token_id).text
            row[str(entry.token_id)] = {"logprob": entry.logprob, "rank": None, "decoded_token": text}
        rows.append(json_of(row))
    return json_list(rows)
