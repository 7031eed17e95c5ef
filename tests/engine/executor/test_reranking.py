from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from octavo.engine import LLM, EngineConfig
from octavo.engine.api.errors import InvalidRequest, OctavoError, RequestFailed
from octavo.engine.api.outputs import TokenLogprob
from octavo.engine.api.reranking import RankedDocument, RerankAnswers, RerankPrompt, ranked
from octavo.engine.client.client import Client
from octavo.engine.client.server_process import ServerProcess
from octavo.engine.executor.mlx_lm_import import utils
from octavo.proto import generation_pb2 as pb
from tiny_models import make_model

pytestmark = pytest.mark.parity

SMALL: dict[str, Any] = {
    "kv_format": "fp16", "num_pages": 64, "max_running": 8, "max_step_tokens": 32, "page_size": 16,
}  # fmt: skip
PROMPT = RerankPrompt(
    template="{instruction}: is {query} told here? {document}\nAnswer:", yes="y", no="n", instruction="Judge"
)
QUERY = "who went home, {document} or not,"
DOCUMENTS = ["the baker", "nobody", "a {query} of words, " * 3, "the baker"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("qwen3"), "qwen3", dtype=mx.float32)


def test_scores_are_of_mlx_lms_logits(folder: Path) -> None:
    model, _ = utils.load_model(folder)
    with LLM(EngineConfig(model=str(folder), **SMALL)) as llm:
        found = llm.rerank(QUERY, DOCUMENTS, prompt=PROMPT)
        best = llm.rerank(QUERY, DOCUMENTS, prompt=PROMPT, top_n=2)
        encode = llm.tokenizer.encode
        yes, no = (encode(word, add_special_tokens=False)[0] for word in "yn")
        prompts = [encode(f"Judge: is {QUERY} told here? {document}\nAnswer:") for document in DOCUMENTS]
    expected = []
    for prompt in prompts:
        logits = np.array(model(mx.array([prompt])).astype(mx.float32))[0, -1].astype(np.float64)
        expected.append(1 / (1 + math.exp(logits[no] - logits[yes])))
    by_index = {document.index: document.score for document in found}
    assert [by_index[index] for index in range(4)] == pytest.approx(expected, abs=2e-3)
    assert by_index[0] == by_index[3]
    assert max(expected) - min(expected) > 0.02, "documents differ"
    assert [d.score for d in found] == sorted(by_index.values(), reverse=True)
    assert best == found[:2]


async def test_over_the_wire_they_are_those_of_python_and_a_prefix_is_computed_once(folder: Path) -> None:
    flags = ["--model", str(folder), "--num-pages", "64", "--page-size", "16", "--kv-format", "fp16"]
    async with ServerProcess(flags) as server, Client(server.ready["grpc"]) as client:
        there = await client.rerank(QUERY, DOCUMENTS, prompt=PROMPT, top_n=3)
        request = pb.RerankRequest(query=QUERY, documents=["first", "second"], yes="y", no="n")
        reply = await client.stub.Rerank(request)
        unit = await client.embed("hello", dimensions=8)
        mean = await client.embed("hello", pooling="mean", normalize=False)
        usage = (await client.stub.Embed(pb.EmbedRequest(text="hello", request_id="me"))).usage
        for wrong, message in WRONG:
            with pytest.raises(InvalidRequest, match=message):
                await client.unary(client.stub.Rerank, wrong)
        for bad, message in WRONG_EMBEDDINGS:
            with pytest.raises(InvalidRequest, match=message):
                await client.unary(client.stub.Embed, bad)
        with pytest.raises(OctavoError, match="pooling must be one of last, mean"):
            await client.embed("hello", pooling="max")  # type: ignore[arg-type]
        with pytest.raises(OctavoError, match="dimensions must be a whole number, got '3'"):
            await client.embed("hello", dimensions="3")  # type: ignore[arg-type]
        with pytest.raises(OctavoError, match="top_n must be a whole number, got 'x'"):
            await client.rerank(QUERY, DOCUMENTS, top_n="x")  # type: ignore[arg-type]
        with pytest.raises(OctavoError, match="top_n must be less than 2\\^31"):
            await client.rerank(QUERY, DOCUMENTS, top_n=2**40)
    with LLM(EngineConfig(model=str(folder), **SMALL)) as llm:
        here = llm.rerank(QUERY, DOCUMENTS, prompt=PROMPT, top_n=3)
        with pytest.raises(InvalidRequest, match="dimensions must be a whole number, got True"):
            llm.embed("hello", dimensions=True)
        with pytest.raises(InvalidRequest, match=r"top_n must be a whole number, got 2\.5"):
            llm.rerank(QUERY, DOCUMENTS, top_n=2.5)  # type: ignore[arg-type]
        assert unit == pytest.approx(llm.embed("hello", dimensions=8)[0], abs=1e-6)
        assert mean == pytest.approx(
            llm.embed("hello", pooling="mean", normalize=False)[0], rel=1e-5, abs=1e-5
        )
    assert there == here
    assert (usage.prompt_tokens, usage.generated_tokens) == (5, 0)
    shared = RerankPrompt().prompts(QUERY, [""])[0].index("<|im_end|>\n<|im_start|>assistant")
    assert reply.usage.cached_tokens == shared // 16 * 16, "the second document shares what is before it"
    assert {document.index for document in reply.results} == {0, 1}


WRONG = [
    (pb.RerankRequest(query="q", yes="y", no="n"), "between 1 and 1000 documents .* got 0"),
    (pb.RerankRequest(query="q", documents=["d"]), "yes must be one token, but 'yes' has 3"),
    (pb.RerankRequest(query="q", documents=["d"], yes="y", no="y"), "yes and no must be different tokens"),
    (
        pb.RerankRequest(query="q", documents=["d"], yes="y", no="n", top_n=0),
        "top_n must be at least 1, got 0",
    ),
    (pb.RerankRequest(query="q", documents=["d"], template="{query}"), "must contain {document} once"),
    (pb.RerankRequest(query="q", documents=["d" * 5000], yes="y", no="n"), "shorten"),
]
WRONG_EMBEDDINGS = [
    (pb.EmbedRequest(), "no prompt"),
    (pb.EmbedRequest(text="x", dimensions=0), "dimensions must be at least 1, got 0"),
    (pb.EmbedRequest(text="x", dimensions=65), "dimensions must be between 1 and 64"),
    (pb.EmbedRequest(text="x", pooling=9), "pooling 9 is unknown"),  # type: ignore[arg-type]
]


def test_a_score_needs_an_answer() -> None:
    answers = RerankAnswers(5, 6)
    assert answers.score([TokenLogprob(5, -0.1, ((5, -0.1), (9, -3.0)))]) == 1.0
    assert answers.score([TokenLogprob(6, -0.1, ((6, -0.1), (9, -3.0)))]) == pytest.approx(0)
    with pytest.raises(InvalidRequest, match="must answer yes or no"):
        answers.score([TokenLogprob(9, -0.1, ((9, -0.1), (8, -3.0)))])
    with pytest.raises(RequestFailed, match="ended before"):
        answers.score([])


def test_equals_stay_in_order() -> None:
    assert ranked([0.5, 0.9, 0.5], 2) == [
        RankedDocument(index=1, score=0.9), RankedDocument(index=0, score=0.5)
    ]  # fmt: skip
    with pytest.raises(InvalidRequest, match="top_n"):
        ranked([0.5], 0)
