from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

import octavo.engine
from demo_model import tasks
from demo_model.batches import encode
from demo_model.tokenizer import train_tokenizer
from octavo_lab.bench.ledgers.documents import make_ledger
from octavo_lab.bench.ledgers.words import Segment, ask, joined

DEMO = Path(octavo.engine.__file__).parent / "demo"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


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
