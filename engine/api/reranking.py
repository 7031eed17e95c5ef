"""Reranking with a generative model: the score is the probability of "yes" against "no"."""

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

MAX_DOCUMENTS = 1000
MAX_ANSWER = 256  # characters per answer token
PLACES = ("{instruction}", "{query}", "{document}")
_PLACE = re.compile("|".join(map(re.escape, PLACES)))
BIAS = 100.0
# from the model card of Qwen3-Reranker
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
    """Yes-or-no question about a document. The defaults suit Qwen3-Reranker.

    instruction   the task, which defines a relevant document
    template      prompt with ``{query}``, ``{document}`` and optionally ``{instruction}``
    yes, no       the two answers; each must be a single token
    """

    instruction: str = INSTRUCTION
    template: str = TEMPLATE
    yes: str = "yes"
    no: str = "no"

    def __post_init__(self) -> None:
        found = _PLACE.findall(self.template)
        for place, rule in zip(PLACES, ("at most once", "once", "once"), strict=True):
            if (count := found.count(place)) > 1 or count < (rule == "once"):
                raise InvalidRequest(
                    f"the template must contain {place} {rule}, got {count} occurrences; correct the template"
                )
        for name, answer in (("yes", self.yes), ("no", self.no)):
            if len(answer) > MAX_ANSWER:
                raise InvalidRequest(
                    f"{name} must be one token, got a text of {len(answer)} characters; give a word that "
                    "the model was trained to answer with"
                )

    def prompts(self, query: str, documents: Sequence[str]) -> list[str]:
        """Return one prompt per document. Raises InvalidRequest if there are none or too many."""
        check_num_documents(len(documents))
        return [self.prompt(query, document) for document in documents]

    def prompt(self, query: str, document: str) -> str:
        words = dict(zip(PLACES, (self.instruction, query, document), strict=True))
        return _PLACE.sub(lambda found: words[found[0]], self.template)

    def num_characters(self, query: str, document: str) -> int:
        return len(self.template) + len(self.instruction) + len(query) + len(document)

    def answers(self, encode: Encode) -> RerankAnswers:
        """Return the token ids of both answers. Raises InvalidRequest unless each is one distinct token."""
        ids = []
        for name, text in (("yes", self.yes), ("no", self.no)):
            if len(found := encode(text)) != 1:
                raise InvalidRequest(
                    f"{name} must be one token, but {text!r} has {len(found)} with this model; give a word "
                    "that the model was trained to answer with"
                )
            ids += found
        if ids[0] == ids[1]:
            raise InvalidRequest(f"yes and no must be different tokens, got {self.yes!r} twice; change one")
        return RerankAnswers(*ids)


@dataclass(frozen=True, slots=True)
class RerankAnswers:
    yes: int
    no: int

    def params(self) -> SamplingParams:
        bias = {self.yes: BIAS, self.no: BIAS}
        return SamplingParams(max_tokens=1, ignore_eos=True, logprobs=2, logit_bias=bias)

    def score(self, logprobs: Sequence[TokenLogprob]) -> float:
        if not logprobs:
            raise RequestFailed("the request ended before its document was scored; send the request again")
        of = dict(logprobs[0].top)
        yes, no = of.get(self.yes, -math.inf), of.get(self.no, -math.inf)
        if yes == no == -math.inf:
            raise InvalidRequest(
                "the model must answer yes or no, but both are e^100 times less likely than another token; "
                "use the template and the answers that the model was trained with"
            )
        return 1 / (1 + math.exp(min(no - yes, 700.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedDocument:
    """Position of a document in the request, and its score between 0 and 1."""

    index: int
    score: float


def ranked(scores: Iterable[float], top_n: int | None = None) -> list[RankedDocument]:
    """Return the ``top_n`` documents with the highest scores, best first. None means all."""
    check_top_n(top_n)
    found = [RankedDocument(index=index, score=score) for index, score in enumerate(scores)]
    return sorted(found, key=lambda document: -document.score)[:top_n]


def check_num_documents(count: int) -> None:
    if not 1 <= count <= MAX_DOCUMENTS:
        raise InvalidRequest(
            f"between 1 and {MAX_DOCUMENTS} documents can be reranked in a call, got {count}; send several "
            "calls"
        )


def check_top_n(top_n: int | None) -> None:
    check_count("top_n", top_n, "all documents")
