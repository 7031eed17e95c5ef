from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.engine import LLM, EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.cli import main
from octavo.kernels.formats import FormatPair
from octavo_lab.bench.quality import Pages, format_pairs
from octavo_lab.bench.quality_measures import (
    BLOCK_TOKENS,
    Predictions,
    ledger_documents,
    perplexity_ratio,
    predict,
)


def test_teacher_forced_answers_are_those_of_greedy_decoding() -> None:
    with LLM(EngineConfig(model="demo", kv_format="fp4", num_pages=128)) as llm:
        documents = ledger_documents(llm.tokenizer, [300], 3, seed=1)
        forced = [each.right_answers(d) for each, d in zip(predict(llm, documents), documents, strict=True)]
        decoded = []
        for document in documents:
            prompts = [document.token_ids[:start] for start, _ in document.answers]
            outputs = llm.generate(prompts, SamplingParams(max_tokens=40), progress=False)
            wanted = [document.token_ids[start:end] for start, end in document.answers]
            decoded.append([o.outputs[0].token_ids == want for o, want in zip(outputs, wanted, strict=True)])
    assert forced == decoded
    assert sum(map(sum, forced)) >= 6


def test_formats_are_pairs() -> None:
    fp4, mixed = FormatPair("fp4", "fp4"), FormatPair("int8", "fp4")
    assert format_pairs("fp4, int8/fp4,fp4") == [Pages(fp4), Pages(mixed)]
    assert format_pairs("fp4,fp4+0,int8/fp4+2") == [Pages(fp4), Pages(fp4, 0), Pages(mixed, 2)]
    assert [str(pages) for pages in format_pairs("fp4,int8/fp4+2")] == ["fp4", "int8/fp4+2"]
    with pytest.raises(argparse.ArgumentTypeError, match=r"'fp4\+x' must be a page format, \+ and a number"):
        format_pairs("fp4+x")
    with pytest.raises(argparse.ArgumentTypeError, match="'fp3' is not known"):
        format_pairs("int8/fp3")


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[dict[str, Any], str]:
    assert main(["bench", "quality", "--lengths", "200", "--documents", "2", "--json", *flags]) == 0
    out = capsys.readouterr().out
    return json.loads(out.splitlines()[-1]), out


def test_the_demo_model_answers_questions_about_ledgers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "quality.png"
    result, table = run(capsys, "--formats", "fp4,int8/fp4", "--plot", str(picture))
    assert list(result["formats"]) == ["bf16", "fp4", "int8/fp4"]
    base, fp4, mixed = result["formats"].values()
    assert (base["perplexity_difference"], base["kl"], base["top1_agreement"]) == (0, 0, 1)
    assert fp4["bytes_per_token"] == 4 * 2 * 2 * 34
    assert mixed["bytes_per_token"] == 4 * 2 * (66 + 34)
    assert 0 < mixed["kl"] < fp4["kl"] < 0.1
    assert base["recall"]["200"]["questions"] >= 4
    assert base["recall"]["200"]["exact"] > 0.8
    assert all(row["decode_tokens_per_s"] > 0 for row in result["formats"].values())
    assert "int8/fp4" in table
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_other_texts_measure_divergence_without_questions(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 30)
    result, table = run(capsys, "--formats", "fp4", "--text", str(text))
    assert result["recall"].startswith("skipped")
    assert "recall" not in result["formats"]["fp4"]
    assert result["documents"] == 2
    assert "recall skipped" in table
    base, fp4 = result["rows"]
    assert (base["format"], base["ratio"], base["ratio_se"]) == ("bf16", 1.0, 0.0)
    assert fp4["ratio"] == pytest.approx(fp4["perplexity"] / base["perplexity"])
    assert 0 < fp4["ratio_se"] < 0.2
    assert fp4["tokens"] == 2 * 199


def test_the_error_of_a_ratio_is_that_of_a_mean_over_blocks() -> None:
    def of(logprobs: list[float]) -> Predictions:
        top = np.zeros((len(logprobs), 1))
        return Predictions(np.array(logprobs), top.astype(np.int64), top)

    base = [of([-1.0] * 4 * BLOCK_TOKENS)]
    worse = [of([-1.0 - loss for loss in (0.0, 0.1, 0.1, 0.2) for _ in range(BLOCK_TOKENS)])]
    found = perplexity_ratio(base, worse)
    assert found.ratio == pytest.approx(np.exp(0.1))
    blocks = np.array([0.0, 0.1, 0.1, 0.2])
    assert found.standard_error == pytest.approx(np.exp(0.1) * blocks.std(ddof=1) / 2)
    assert perplexity_ratio([of([-1.0] * 9)], [of([-2.0] * 9)]).standard_error is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--kv-format", "fp4"), "--kv-format is what this benchmark varies"),
        (("--lengths", "8000"), "--lengths must be at most 7680 for this model, got 8000"),
        (("--text", "/nowhere.txt"), "/nowhere.txt cannot be read"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str) -> None:
    assert main(["bench", "quality", "--documents", "1", *flags]) == 2
    assert message in capsys.readouterr().err
