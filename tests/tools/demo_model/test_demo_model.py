from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer

import octavo.engine
from demo_model import tasks
from demo_model.batches import encode, make_batch, row_length
from demo_model.tokenizer import train_tokenizer
from octavo_lab.bench.ledgers.documents import held_out, make_ledger
from octavo_lab.bench.ledgers.words import ANSWER_WEIGHT, STOP, Segment, ask, estimated_tokens, joined

DEMO = Path(octavo.engine.__file__).parent / "demo"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def test_ledgers_are_as_long_as_they_say(tokenizer: Tokenizer) -> None:
    """Coined names take more tokens than estimated, so single ledgers may be a quarter too long."""
    for length in (128, 512, 2048):
        sizes = [len(encode(tokenizer, ledger.segments()).ids) for ledger in held_out(length, 8)]
        assert 0.75 * length <= min(sizes) <= max(sizes) <= 1.25 * length
        assert abs(np.mean(sizes) - length) < 0.15 * length


def test_segments_encode_as_the_whole_text_does(tokenizer: Tokenizer) -> None:
    makers: list[Callable[[Random], list[Segment]]] = [
        tasks.filler,
        lambda rng: tasks.recall(rng, 200),
        lambda rng: make_ledger(rng, 300).segments(),
    ]
    for seed in range(30):
        for make in makers:
            segments = make(Random(seed))
            whole = tokenizer.encode(joined(segments), add_special_tokens=False).ids
            assert encode(tokenizer, segments).ids.tolist() == whole


def test_batches_depend_on_seed_and_step_alone(tokenizer: Tokenizer) -> None:
    def make(step: int) -> tuple[str, tuple[int, ...]]:
        batch = make_batch(tokenizer, seed=0, step=step, progress=step / 2500, tokens=2048)
        assert batch.ids.shape == batch.weights.shape
        assert (batch.weights == np.float32(ANSWER_WEIGHT)).any()
        return hashlib.sha256(batch.ids.tobytes() + batch.weights.tobytes()).hexdigest(), batch.ids.shape

    assert make(1500) == make(1500)
    assert make(1500) != make(1501)


def test_rows_grow_longer_with_progress() -> None:
    rng = Random(0)
    mean = [
        np.mean([row_length(rng, progress) for _ in range(300)]) for progress in (0.0, 0.2, 0.5, 0.7, 0.95)
    ]
    assert mean == sorted(mean)


def test_lists_are_sorted_copied_and_counted() -> None:
    for seed in range(100):
        (question, _), (answer, _) = tasks.lists(Random(seed))
        result = answer.removesuffix(STOP)
        if "Count from " in question:
            first, last = (int(word.strip(".")) for word in _asked(question).split()[2::2])
            assert result == " ".join(str(value) for value in range(first, last + 1))
        elif "Sort: " in question and "," not in question:
            assert result.split() == sorted(_asked(question).removeprefix("Sort: ").split())
        elif "Sort: " in question:
            assert result.split(", ") == sorted(_asked(question).removeprefix("Sort: ").split(", "))
        else:
            assert result == _asked(question).removeprefix("Copy: ")


def _asked(prompt: str) -> str:
    return prompt.removeprefix("<|im_start|>user\n").split(STOP)[0]


def test_estimated_tokens_is_good_to_a_few_per_cent(tokenizer: Tokenizer) -> None:
    text = held_out(1024, 4)[1].body
    true = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert abs(estimated_tokens(text) - true) < 0.12 * true


def test_the_embedded_tokenizer_is_the_one_these_scripts_train() -> None:
    """Training takes one second, and its result equals the shipped file."""
    assert json.loads(train_tokenizer().to_str()) == json.loads((DEMO / "tokenizer.json").read_text())


def test_the_embedded_folder_is_complete_and_small() -> None:
    names = {path.name for path in DEMO.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= names
    assert sum(path.stat().st_size for path in DEMO.iterdir() if path.is_file()) <= 10_000_000


def test_the_chat_template_renders_a_trained_prompt() -> None:
    import jinja2

    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    text = jinja2.Template(settings["chat_template"]).render(
        messages=[{"role": "user", "content": "Hello!"}], add_generation_prompt=True
    )
    assert text == ask("Hello!")
