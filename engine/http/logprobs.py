"""Log probabilities in the forms of chat and of text completions, and of vLLM for prompts."""

from __future__ import annotations

import codecs
from typing import Any

from pydantic_core import to_json

from ..api.outputs import Delta, PromptLogprobs, TokenLogprob
from ..api.sampling_params import SamplingParams
from .answer_models import AnswerModel, json_list
from .token_texts import TokenTexts


class CompletionLogprobs(AnswerModel):
    """``logprobs`` of a choice of a text completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


def shown_logprobs(delta: Delta, params: SamplingParams) -> tuple[TokenLogprob, ...]:
    """Return the entries of a delta, without a final token that has no text."""
    ended_by_token = bool(delta.token_ids) and delta.stop_match == delta.token_ids[-1]
    ended_by_token = ended_by_token and not params.include_stop_str_in_output
    return delta.logprobs[:-1] if ended_by_token else delta.logprobs


def chat_logprobs(
    entries: tuple[TokenLogprob, ...], texts: TokenTexts, top: int, *, as_ids: bool = False
) -> bytes:
    """Return log probabilities in the form of chats, as JSON; ``top``: number of likeliest tokens to show."""

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
        return _json(shown(entry.token_id, entry.logprob) | {"top_logprobs": likeliest})

    return b'{"content":%b,"refusal":null}' % json_list(map(written, entries))


class CompletionLogprobWriter:
    """Writes the log probabilities of one sample during generation, with offsets into its text."""

    def __init__(self, texts: TokenTexts, top: int, *, as_ids: bool = False) -> None:
        self._texts = texts
        self._top = top
        self._as_ids = as_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, entries: tuple[TokenLogprob, ...]) -> CompletionLogprobs:
        found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        self.add(found, entries)
        return found

    def add_first(self, found: CompletionLogprobs, token_id: int) -> None:
        """Add the first token of a prompt, which has no log probability."""
        self._add(found, token_id, None, None)

    def add(self, found: CompletionLogprobs, entries: tuple[TokenLogprob, ...]) -> None:
        for entry in entries:
            top = {self._shown(token): logprob for token, logprob in entry.top[: self._top]}
            top.setdefault(self._shown(entry.token_id), entry.logprob)
            self._add(found, entry.token_id, entry.logprob, top)

    def _add(
        self, found: CompletionLogprobs, token_id: int, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        found.tokens.append(self._shown(token_id))
        found.token_logprobs.append(logprob)
        assert found.top_logprobs is not None
        found.top_logprobs.append(top)
        found.text_offset.append(self._offset)
        self._offset += len(self._decoder.decode(self._texts.of(token_id).data or b""))

    def _shown(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._texts.of(token_id).escaped


def prompt_entries(found: PromptLogprobs, texts: TokenTexts) -> bytes:
    """Return the log probabilities of a prompt's tokens as JSON, in vLLM's form: for each token a dict from
    token id to ``logprob``, ``rank`` and ``decoded_token``; the first has none."""
    rows = [b"null"]
    for entry in found.rest:
        row: dict[str, dict[str, Any]] = {}
        for rank, (token, logprob) in enumerate(entry.top, 1):
            row[str(token)] = {"logprob": logprob, "rank": rank, "decoded_token": texts.of(token).text}
        if str(entry.token_id) not in row:
            text = texts.of(entry.token_id).text
            row[str(entry.token_id)] = {"logprob": entry.logprob, "rank": None, "decoded_token": text}
        rows.append(_json(row))
    return json_list(rows)


def _json(value: dict[str, Any]) -> bytes:
    return to_json(value, inf_nan_mode="null")
