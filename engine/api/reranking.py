"""Reranking by a generating model: a document's score is the probability of yes against no."""

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

MAX_DOCUMENTS = 1000  # of one call
MAX_ANSWER = 256  # characters; no token has more that a model answers with
PLACES = ("{instruction}", "{query}", "{document}")
_PLACE = re.compile("|".join(map(re.escape, PLACES)))
BIAS = 100.0  # the most there may be: lifts both answers above everything else, and their distance stays
# Those of Qwen3-Reranker's model card. What documents share comes first, so that it is computed once.
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
    """Question that a model is asked about a document. The defaults are Qwen3-Reranker's.

    instruction   what makes a document a good one
    template      the prompt, with ``{query}`` and ``{document}`` once each, and ``{instruction}`` at most
                  once. Documents share the cached pages of what comes before ``{document}``
    yes, no       the answers, each one token of the model's
    """

    instruction: str = INSTRUCTION
    template: str = TEMPLATE
    yes: str = "yes"
    no: str = "no"

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        for place, least in zip(PLACES, (0, 1, 1), strict=True):
            if not least <= (count := self.template.count(place)) <= 1:
                rule = "once" if least else "at most once"
                raise InvalidRequest(f"the template must have {place} {rule}, it has it {count} times")
        for name, answer in (("yes", self.yes), ("no", self.no)):
            if len(answer) > MAX_ANSWER:
                raise InvalidRequest(
                    f"{name} must be one token, but it has {len(answer)} characters; give words that "
                    "the model was trained to answer with"
                )

    def prompts(self, query: str, documents: Sequence[str]) -> list[str]:
        """Return one for each document. Raise InvalidRequest for none, or for too many."""
        check_num_documents(len(documents))
        return [self.prompt(query, document) for document in documents]

    def prompt(self, query: str, document: str) -> str:
        """Return the prompt about one document."""
        words = dict(zip(PLACES, (self.instruction, query, document), strict=True))
        return _PLACE.sub(lambda found: words[found[0]], self.template)

    def num_characters(self, query: str, document: str) -> int:
        """Return the length of ``prompt``, or a little more, without making it."""
        return len(self.template) + len(self.instruction) + len(query) + len(document)

    def answers(self, encode: Encode) -> RerankAnswers:
        """The answers' token ids. ``encode``: text to ids, without special tokens. InvalidRequest if one is
        not one token, or they are the same."""
        ids = []
        for name, text in (("yes", self.yes), ("no", self.no)):
            if len(found := encode(text)) != 1:
                raise InvalidRequest(
                    f"{name} must be one token, but {text!r} is {len(found)} of this model's; give words "
                    "that it was trained to answer with"
                )
            ids += found
        if ids[0] == ids[1]:
            raise InvalidRequest(f"yes and no must differ, both are {self.yes!r}")
        return RerankAnswers(*ids)


@dataclass(frozen=True, slots=True)
class RerankAnswers:
    """Token ids of the two answers."""

    yes: int
    no: int

    def params(self) -> SamplingParams:
        """That bring the log probabilities of both, and nothing else."""
        bias = {self.yes: BIAS, self.no: BIAS}
        return SamplingParams(max_tokens=1, ignore_eos=True, logprobs=2, logit_bias=bias)

    def score(self, logprobs: Sequence[TokenLogprob]) -> float:
        """P(yes) / (P(yes) + P(no)), of the one token that ``params`` gave."""
        if not logprobs:
            raise RequestFailed("the request ended before its document was judged")
        of = dict(logprobs[0].top)
        yes, no = of.get(self.yes, -math.inf), of.get(self.no, -math.inf)
        if yes == no == -math.inf:
            raise InvalidRequest(
                "the model has neither answer in mind: each is e^100 times less likely than another token; "
                "give the template and the words that it was trained with"
            )
        return 1 / (1 + math.exp(min(no - yes, 700.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedDocument:
    """Document of an answer, and its score.

    index   of the document, as it was given
    score   how likely yes is, against no: between 0 and 1
    """

    index: int
    score: float


def ranked(scores: Iterable[float], top_n: int | None = None) -> list[RankedDocument]:
    """The best first, between equals as they were given; the first ``top_n`` (None: all). InvalidRequest."""
    check_top_n(top_n)
    found = [RankedDocument(index=index, score=score) for index, score in enumerate(scores)]
    return sorted(found, key=lambda document: -document.score)[:top_n]


def check_num_documents(count: int) -> None:
    """Raise InvalidRequest unless so many documents can be reranked at once."""
    if not 1 <= count <= MAX_DOCUMENTS:
        raise InvalidRequest(
            f"between 1 and {MAX_DOCUMENTS} documents are reranked at once, got {count}; "
            "send more of them in several calls"
        )


def check_top_n(top_n: int | None) -> None:
    """InvalidRequest if so many documents cannot be asked for."""
    check_count("top_n", top_n, "all documents")
