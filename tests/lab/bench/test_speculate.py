from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tiny_heads
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.memory.model_files import DEMO
from octavo.engine.tokenizer.tokenizer import load_tokenizer
from octavo_lab.bench import speculate
from octavo_lab.bench.draft_texts import TEXTS

pytestmark = pytest.mark.usefixtures("every_draft_is_computed")


def run(*flags: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    speculate.add_arguments(parser)
    return dict(json.loads(json.dumps(speculate.run(parser.parse_args(flags)))))


def test_copies_and_forms_are_guessed_and_fresh_tokens_are_not(tmp_path: Path) -> None:
    picture = tmp_path / "drafts.svg"
    result = run(
        "--texts", "copy,json,free", "--batch", "1,2", "--rounds", "1", "--prompt-tokens", "100",
        "--output-tokens", "60", "--page-size", "16", "--plot", str(picture),
    )  # fmt: skip
    rows = {(row["text"], row["batch"]): row for row in result["results"]}  # type: ignore[attr-defined]
    assert rows.keys() == {(text, batch) for text in ("copy", "json", "free") for batch in (1, 2)}
    assert rows["copy", 1]["accepted_share"] > 0.5
    assert rows["copy", 1]["mean_acceptance_length"] > 1.5
    assert rows["json", 1]["accepted_share"] > 0.5
    assert rows["json", 1]["mean_acceptance_length"] > 1.5
    assert rows["free", 1]["accepted_share"] in (None, 0)
    assert all(row["ratio"] > 0 and row["cpu_ratio"] > 0 for row in rows.values())
    cases = result["cases"]
    assert cases["json"]["speedup"].keys() == {"1", "2"}  # type: ignore[index]
    assert cases["copy"]["accepted_length"] == rows["copy", 1]["mean_acceptance_length"]  # type: ignore[index]
    assert picture.stat().st_size > 1000


def test_answers_about_a_ledger_are_found_in_it() -> None:
    short = "--prompt-tokens", "150", "--output-tokens", "120", "--page-size", "16"
    result = run("--texts", "ledger", "--batch", "2", "--rounds", "2", *short)
    assert isinstance(result["results"], list)
    (row,) = result["results"]
    assert (row["text"], row["batch"], len(row["ratios"])) == ("ledger", 2, 2)
    assert min(row["ratios"]) > 0
    assert row["accepted_share"] > 0.2
    core = SimpleNamespace(tokenizer=load_tokenizer(DEMO))
    rng = np.random.default_rng(1)
    for _ in range(20):
        prompt, answer = TEXTS["ledger"].make(rng, [0] * 400, 40, core)  # type: ignore[arg-type]
        assert len(prompt) <= 400
        assert 3 <= len(answer) <= 40
        said = core.tokenizer.decode(answer[:-1])
        assert said.endswith(".")
        asked = core.tokenizer.decode(prompt)
        assert any(word in asked for word in said.split()), "a name, or what is asked for"


def test_draft_models_predict_the_models_tokens(tmp_path: Path) -> None:
    short = "--batch", "2", "--rounds", "1", "--prompt-tokens", "20", "--output-tokens", "24"
    folder = str(tiny_heads.make_model(tmp_path / "glm", "glm4_moe", agrees=True))
    for drafter in ("mtp", f"draft:{folder}"):
        result = run("--model", folder, "--speculate", drafter, "--page-size", "8", *short)
        assert result["speculate"] == drafter
        assert isinstance(result["results"], list)
        (row,) = result["results"]
        assert row["text"] == "own"
        assert row["accepted_share"] > 0.8


def test_unsupported_measurements_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="speculate must not be off"):
        run("--speculate", "off")
    with pytest.raises(InvalidConfig, match="no model predicts dictated text; leave --texts out"):
        run("--speculate", "mtp", "--texts", "copy")
    with pytest.raises(InvalidConfig, match="no text is called 'poem'"):
        run("--texts", "poem")
