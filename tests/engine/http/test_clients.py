from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from http_served import demo_http

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.filterwarnings("default")]
ASK = "Tell me a story about Mara."
DEMO = Path(__file__).resolve().parents[3] / "engine" / "demo"


def ask_litellm(base: str) -> str:
    litellm: Any = pytest.importorskip("litellm", reason="litellm is not installed")
    given = {"model": "openai/demo", "api_base": base, "api_key": "x"}
    chat = given | {"messages": [{"role": "user", "content": ASK}], "max_tokens": 8, "temperature": 0}
    whole = litellm.completion(**chat).choices[0].message.content
    events = litellm.completion(**chat, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole
    assert len(litellm.embedding(**given, input=["a", "b"]).data) == 2
    return str(whole)


def ask_langchain(base: str) -> str:
    langchain: Any = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    given = {"model": "demo", "base_url": base, "api_key": "x"}
    chat = langchain.ChatOpenAI(**given, temperature=0, max_tokens=8)
    whole = chat.invoke(ASK).content
    assert "".join(event.content for event in chat.stream(ASK)) == whole
    embeddings = langchain.OpenAIEmbeddings(**given, check_embedding_ctx_length=False)
    assert len(embeddings.embed_documents(["a", "b"])) == 2
    return str(whole)


def ask_llm(base: str) -> str:
    pytest.importorskip("llm", reason="llm is not installed")
    models: Any = pytest.importorskip("llm.default_plugins.openai_models")
    model = models.Chat("demo", model_name="demo", api_base=base)
    return str(model.prompt(ASK, temperature=0, max_tokens=8, key="x").text())


@pytest.mark.parametrize("ask", [ask_litellm, ask_langchain, ask_llm])
async def test_a_program_gets_its_answers(ask: Callable[[str], str]) -> None:
    async with demo_http() as served:
        text = await asyncio.to_thread(ask, f"http://{served.address}/v1")
        own = await served.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": ASK}], "max_tokens": 8, "temperature": 0},
        )
        assert text == own.json["choices"][0]["message"]["content"]


TASK = """
task: tales
dataset_path: json
dataset_kwargs: {data_files: FILE}
test_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
TALES = (
    ("Once there was a baker named", ["Mara", "of the"], 0),
    ("In the town of Kyoto lived", ["named", "Hugo"], 1),
)


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
async def test_an_evaluation_gets_the_log_probabilities_of_mlx_lm(tmp_path: Path) -> None:
    file = tmp_path / "tales.jsonl"
    documents = [dict(zip(("question", "choices", "answer"), tale, strict=True)) for tale in TALES]
    file.write_text("\n".join(json.dumps(document) for document in documents))
    (tmp_path / "tales.yaml").write_text(TASK.replace("FILE", str(file)))
    async with demo_http() as served:
        url = f"http://{served.address}/v1/completions"
        options = ["--tasks", "tales", "--include_path", str(tmp_path), "--log_samples"]
        options += ["--output_path", str(tmp_path / "out"), "--model", "local-completions"]
        options += ["--model_args", f"model=demo,base_url={url},tokenizer={DEMO},num_concurrent=1"]
        own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "OPENAI_API_KEY": "none"}
        command = [sys.executable, "-m", "lm_eval", *options]
        await asyncio.to_thread(subprocess.run, command, check=True, env=os.environ | own)
    [log] = (tmp_path / "out").rglob("samples_tales_*.jsonl")
    samples = [json.loads(line) for line in log.read_text().splitlines()]
    model, tokenizer, *_ = mlx_lm.load(str(DEMO))
    assert [sample["acc"] for sample in samples] == [1.0, 1.0]
    for sample in samples:
        for choice, reply in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            first = tokenizer.encode(sample["doc"]["question"])
            ids = tokenizer.encode(f"{sample['doc']['question']} {choice}")
            logits = model(mx.array([ids]))[0].astype(mx.float32)
            scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            wanted = sum(scores[at - 1, ids[at]].item() for at in range(len(first), len(ids)))
            # bf16 logits have rounding errors of up to 0.06.
            assert float(reply[0]) == pytest.approx(wanted, rel=0.05, abs=0.05)


@pytest.mark.skipif(shutil.which("guidellm") is None, reason="guidellm, which needs torch, is not installed")
async def test_guidellm_counts_every_token_of_its_streams(tmp_path: Path) -> None:
    async with demo_http() as served:
        command = ["guidellm", "run", "--disable-console-interactive"]
        command += ["--backend", f"kind=openai_http,target=http://{served.address},model=demo"]
        command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8"]
        command += [
            "--tokenizer",
            f"kind=hf_auto,model={DEMO}",
            "--output",
            f"kind=json,path={tmp_path}/x.json",
        ]
        own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
        await asyncio.to_thread(subprocess.run, command, check=True, cwd=tmp_path, env=os.environ | own)
    [found] = json.loads((tmp_path / "x.json").read_text())["benchmarks"]
    assert found["metrics"]["request_totals"] == {"successful": 4, "errored": 0, "incomplete": 0, "total": 4}
    for request in found["requests"]["successful"]:
        assert (request["output_tokens"], request["output_metrics"]["text_tokens"]) == (8, 8)
        assert 0 < request["time_to_first_token_ms"] < request["request_latency"] * 1e3
