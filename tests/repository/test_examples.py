from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_batch_answers_every_prompt_in_order(tmp_path: Path) -> None:
    prompts = ["Tell me a story about Hugo.", "Tell me a story about Vera."]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    run("batch.py", str(tmp_path / "prompts.txt"), str(tmp_path / "answers.jsonl"))
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    assert all(answer["answer"] for answer in answers)


def test_structured_output_follows_the_schema() -> None:
    answer = ast.literal_eval(run("structured_output.py"))
    assert answer.keys() == {"name", "age"}
    assert isinstance(answer["age"], int)


def test_embeddings_rank_every_text() -> None:
    scores = [float(line.split()[0]) for line in run("embeddings.py").splitlines()]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


def test_prefix_cache_finds_the_common_prefix() -> None:
    first, second = run("prefix_cache.py").splitlines()
    assert " 0 of " in first
    assert " 0 of " not in second
