"""Reranking with a generative model: a document's score is the probability of yes against no."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .errors import InvalidRequest, RequestFailed
from .outputs import TokenLogprob
from .sampling_params import SamplingParams
from .setting_types import check_count

MAX_DOCUMENTS = 1000  # documents in a call
MAX_ANSWER = 256  # characters; no answer token is longer
PLACES = ("{instruction}", "{query}", "{document}")
_PLACE = re.compile("|".join(map(re.escape, PLACES)))
BIAS = 100.0  # largest logit bias; lifts both answers above all other tokens and keeps their difference
# From Qwen3-Reranker's model card. The shared part comes first, so that it is computed once.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)

Encode: TypeAlias = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankPrompt:
    """Question about a document that the model answers with yes or no. The defaults are Qwen3-Reranker's.

    instruction   the task, which defines a good document
    template      the prompt, with ``{query}`` and ``{document}`` once each, and ``{instruction}`` at most
                  once. Documents share the cached pages of the part before ``{document}``
    yes, no       the answers, each one token of the model
    """

    instruction: str = INSTRUCTION
    template: str = TEMPLATE
    yes: str = "yes"
    no: str = "no"

    def __post_init__(self) -> None:
        """Raise InvalidRequest for an unusable template or answer."""
        for place, least in zip(PLACES, (0, 1, 1), strict=True):
            if not least <= (count := self.template.count(place)) <= 1:
                rule = "once" if least else "at most once"
                raise InvalidRequest(
                    f"the template must contain {place} {rule}, got it {count} times; correct it"
                )
        for name, answer in (("yes", self.yes), ("no", self.no)):
            if len(answer) > MAX_ANSWER:
                raise InvalidRequest(
                    f"{name} must be one token, got a text of {len(answer)} characters; give a word that "
                    "the model was trained to answer with"
                )

    def prompts(self, query: str, documents: Sequence[str]) -> list[str]:
        """Return a prompt for each document. Raise InvalidRequest for no documents, or for too many."""
        check_num_documents(len(documents))
        return [self.prompt(query, document) for document in documents]

    def prompt(self, query: str, document: str) -> str:
        """Return the prompt for one document."""
        words = dict(zip(PLACES, (self.instruction, query, document), strict=True))
        return _PLACE.sub(lambda found: words[found[0]], self.template)

    def num_characters(self, query: str, document: str) -> int:
        """Return an upper estimate of the length of ``prompt`` without building it."""
        return len(self.template) + len(self.instruction) + len(query) + len(document)

    def answers(self, encode: Encode) -> RerankAnswers:
        """Return the token ids of both answers. ``encode`` turns text into ids, without special tokens.
        Raises InvalidRequest unless the answers are single tokens that differ."""
        ids = []
        for name, text in (("yes", self.yes), ("no", self.no)):
            if len(found := encode(text)) != 1:
                raise InvalidRequest(
                    f"{name} must be one token, but {text!r} is {len(found)} of this model's; give words "
                    "that it was trained to answer with"
                )
            ids += found
        if ids[0] == ids[1]:
            raise InvalidRequest(f"yes and no must differ, got {self.yes!r} for both; change one")
        return RerankAnswers(*ids)


@dataclass(frozen=True, slots=True)
class RerankAnswers:
    """Token ids of the two answers."""

    yes: int
    no: int

    def params(self) -> SamplingParams:
        """Sampling parameters that yield the log probabilities of both answers and nothing else."""
        bias = {self.yes: BIAS, self.no: BIAS}
        return SamplingParams(max_tokens=1, ignore_eos=True, logprobs=2, logit_bias=bias)

    def score(self, logprobs: Sequence[TokenLogprob]) -> float:
        """Return P(yes) / (P(yes) + P(no)) from the token sampled with ``params``."""
        if not logprobs:
            raise RequestFailed("the request ended before its document was judged")
        of = dict(logprobs[0].top)
        yes, no = of.get(self.yes, -math.inf), of.get(self.no, -math.inf)
        if yes == no == -math.inf:
            raise InvalidRequest(
                "the model does not answer yes or no: each is e^100 times less likely than another token; "
                "give the template and the answers that it was trained with"
            )
        return 1 / (1 + math.exp(min(no - yes, 700.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedDocument:
    """A document's place in the ranking.

    index   position of the document in the request
    score   probability of yes against no, between 0 and 1
    """

    index: int
    score: float


def ranked(scores: Iterable[float], top_n: int | None = None) -> list[RankedDocument]:
    """Return the ``top_n`` documents with the highest scores (None: all), the highest first. Equal scores
    keep the given order. Raises InvalidRequest for an invalid ``top_n``."""
    check_top_n(top_n)
    found = [RankedDocument(index=index, score=score) for index, score in enumerate(scores)]
    return sorted(found, key=lambda document: -document.score)[:top_n]


def check_num_documents(count: int) -> None:
    """Raise InvalidRequest if there are no documents, or too many for one call."""
    if not 1 <= count <= MAX_DOCUMENTS:
        raise InvalidRequest(
            f"between 1 and {MAX_DOCUMENTS} documents can be reranked in a call, got {count}; send several "
            "calls"
        )


def check_top_n(top_n: int | None) -> None:
    """Raise InvalidRequest unless ``top_n`` is None or a positive whole number."""
    check_count("top_n", top_n, "all documents")
