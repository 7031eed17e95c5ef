"""Effects of a page format on a model's predictions, measured through the paged engine.

The model is *teacher forced*: each token is predicted after the correct previous ones. If all tokens of an
answer are the likeliest, greedy decoding gives this answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.engine.api.errors import InvalidConfig, RequestFailed
from octavo.engine.api.outputs import FinishReason, RequestOutput
from octavo.engine.api.sampling_params import MAX_LOGPROBS, SamplingParams
from octavo.engine.frontend.llm import LLM
from octavo.engine.tokenizer.tokenizer import Tokenizer
from octavo.kernels.formats import page_format

from .ledgers.documents import held_out
from .ledgers.words import ANSWER_WEIGHT

DECODE_SEQUENCES, DECODE_TOKENS = 8, 48
DOCUMENTS_AT_ONCE = 8
BLOCK_TOKENS = 256  # tokens of a document that count as one observation
MIN_TOKENS = 16  # smallest length of a document


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids; ``answers`` are index ranges [start, end), and ``length`` is the requested length."""

    length: int
    token_ids: list[int]
    answers: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of tokens 1..T-1 of a document, each after the correct previous tokens.

    logprobs  [T - 1]     log probability of the correct token
    top_ids   [T - 1, n]  the likeliest tokens, likeliest first
    top       [T - 1, n]  their log probabilities
    """

    logprobs: NDArray[np.float64]
    top_ids: NDArray[np.int64]
    top: NDArray[np.float64]

    def right_answers(self, document: Document) -> list[bool]:
        """Return, for each answer of the document, whether greedy decoding gives exactly this answer."""
        hits = self.top_ids[:, 0] == np.array(document.token_ids[1:])
        return [bool(hits[start - 1 : end - 1].all()) for start, end in document.answers]


def ledger_documents(tokenizer: Tokenizer, lengths: Sequence[int], count: int, seed: int) -> list[Document]:
    """Return ``count`` held-out ledgers of each length, with all questions and answers."""
    documents = []
    for length in lengths:
        for ledger in held_out(length, count, seed=seed):
            token_ids: list[int] = []
            answers = []
            for text, weight in ledger.segments():
                segment = tokenizer.encode(text, add_special_tokens=False)
                if weight == ANSWER_WEIGHT:
                    answers.append((len(token_ids), len(token_ids) + len(segment)))
                token_ids += segment
            documents.append(Document(length, token_ids, tuple(answers)))
    return documents


def text_documents(tokenizer: Tokenizer, path: Path, lengths: Sequence[int], count: int) -> list[Document]:
    """Return up to ``count`` consecutive pieces of the file for each length."""
    try:
        token_ids = tokenizer.encode(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} cannot be read as text: {error}") from None
    if len(token_ids) < MIN_TOKENS:
        raise InvalidConfig(f"{path} has {len(token_ids)} tokens; give a text of at least {MIN_TOKENS}")
    documents = []
    for length in lengths:
        size = min(length, len(token_ids))
        starts = range(0, len(token_ids) - size + 1, size)[:count]
        documents += [Document(length, token_ids[start : start + size], ()) for start in starts]
    return documents


def predict(llm: LLM, documents: Sequence[Document]) -> list[Predictions]:
    """Return the engine's predictions for documents. Raises RequestFailed."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=MAX_LOGPROBS)
    predictions = []
    for first in range(0, len(documents), DOCUMENTS_AT_ONCE):
        prompts = [document.token_ids for document in documents[first : first + DOCUMENTS_AT_ONCE]]
        predictions += [_predictions(output) for output in llm.generate(prompts, params, progress=False)]
    return predictions


def decode_rate(llm: LLM, documents: Sequence[Document]) -> float:
    """Return tokens per second while a few of the longest documents decode together."""
    longest = max(document.length for document in documents)
    prompts = [d.token_ids for d in documents if d.length == longest][:DECODE_SEQUENCES]
    params = SamplingParams(max_tokens=DECODE_TOKENS, ignore_eos=True)
    llm.generate(prompts, replace(params, max_tokens=2), progress=False)  # untimed, to fill the prefix cache
    outputs = _checked(llm.generate(prompts, params, progress=False))
    began, ended = min(o.ttft_s for o in outputs), max(o.latency_s for o in outputs)
    return len(prompts) * (DECODE_TOKENS - 1) / max(ended - began, 1e-9)


def divergence(base: Predictions, other: Predictions) -> float:
    """Return a lower bound of the mean Kullback-Leibler divergence of ``other`` from ``base``, in nats.

    All tokens that are not among the likeliest of both count as one token.
    """
    total = 0.0
    for ids, logprobs, other_ids, other_logprobs in zip(
        base.top_ids, base.top, other.top_ids, other.top, strict=True
    ):
        _, mine, theirs = np.intersect1d(ids, other_ids, return_indices=True)
        p, q = np.exp(logprobs[mine]), np.exp(other_logprobs[theirs])
        p, q = (np.append(each, max(1 - each.sum(), 1e-9)) for each in (p, q))
        total += float((p * np.log(p / q)).sum())
    return total / len(base.top_ids)


@dataclass(frozen=True, slots=True)
class PerplexityRatio:
    """A format's perplexity divided by the baseline's; the standard error is None for a single block."""

    ratio: float
    standard_error: float | None


def perplexity_ratio(base: Sequence[Predictions], other: Sequence[Predictions]) -> PerplexityRatio:
    """Return ``other``'s perplexity divided by ``base``'s, with a standard error.

    The error is computed over blocks of ``BLOCK_TOKENS`` tokens, because neighbouring tokens are not
    independent.
    """
    changes = [
        block
        for mine, theirs in zip(base, other, strict=True)
        for block in np.split(
            mine.logprobs - theirs.logprobs, range(BLOCK_TOKENS, len(mine.logprobs), BLOCK_TOKENS)
        )
    ]
    change = _mean([block.sum() for block in changes], [len(block) for block in changes])
    ratio, error = float(np.exp(change.mean)), change.standard_error
    return PerplexityRatio(ratio, None if error is None else ratio * error)


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of two shares of correct answers to the same questions."""

    mean: float
    standard_error: float | None


def _mean(all_sums: Sequence[float], all_sizes: Sequence[int]) -> Difference:
    sums, sizes = np.array(all_sums), np.array(all_sizes)
    mean, count = float(sums.sum() / sizes.sum()), len(sizes)
    if count < 2:
        return Difference(mean, None)
    spread = ((sums - mean * sizes) ** 2).sum() * count / (count - 1)
    return Difference(mean, float(np.sqrt(spread) / sizes.sum()))


def paired_difference(documents: Sequence[tuple[NDArray[np.bool_], NDArray[np.bool_]]]) -> Difference:
    """Return the change in the share of correct answers.

    documents   for each document, which answers were correct (before, after)

    The error comes from a ratio estimator over documents; None for a single document.
    """
    changes = [int(after.sum()) - int(before.sum()) for before, after in documents]
    return _mean(changes, [len(after) for _, after in documents])


def row_errors(name: str, head_dim: int) -> dict[str, float]:
    """Return relative RMS errors of stored rows, without and with outlier channels."""
    rng, fmt = np.random.default_rng(0), page_format(name)
    rows = rng.standard_normal((2000, head_dim)).astype(np.float32)
    channels = rng.choice(head_dim, min(4, head_dim), replace=False)
    errors = {}
    for kind, factor in (("gaussian", 1), ("outliers_8x", 8), ("outliers_30x", 30)):
        spoilt = rows.copy()
        spoilt[:, channels] *= factor
        difference = fmt.restore(*fmt.store(spoilt)[:2]) - spoilt
        errors[kind] = float(np.sqrt((difference**2).sum() / (spoilt**2).sum()))
    return errors


def _predictions(output: RequestOutput) -> Predictions:
    _checked([output])
    assert output.prompt_logprobs is not None, "asked for above"
    rest = output.prompt_logprobs.rest
    return Predictions(
        np.array([token.logprob for token in rest]),
        np.array([[token_id for token_id, _ in token.top] for token in rest]),
        np.array([[logprob for _, logprob in token.top] for token in rest]),
    )


def _checked(outputs: list[RequestOutput]) -> list[RequestOutput]:
    for output in outputs:
        if output.outputs[0].finish_reason is FinishReason.ERROR:
            raise RequestFailed(f"the benchmark's request failed: {output.outputs[0].error}")
    return outputs
