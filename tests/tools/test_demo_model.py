"""The demo model's texts: the same everywhere, right by construction, and its folder complete."""

from __future__ import annotations

import hashlib
import json
import re
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
from octavo.engine.bench.ledgers.documents import held_out, make_ledger
from octavo.engine.bench.ledgers.kinds import KINDS, Codes, KeysExhausted, Kind
from octavo.engine.bench.ledgers.words import ANSWER_WEIGHT, STOP, Segment, ask, estimated_tokens, joined

DEMO = Path(octavo.engine.__file__).parent / "demo"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_the_published_accuracy_is_about_these_very_documents() -> None:
    """The digests of the held-out ledgers that the README's table was measured with."""
    texts = {
        length: "".join(joined(ledger.segments()) for ledger in held_out(length, 24))
        for length in (128, 1024)
    }
    assert digest(texts[128]) == "6b96a7fe671e8d6f"
    assert digest(texts[1024]) == "27957132f350e517"


def test_held_out_ledgers_are_no_training_ledgers() -> None:
    held = {ledger.body for ledger in held_out(256, 8)}
    trained = {make_ledger(Random(f"train:0:{step}"), 256, share=0.7).body for step in range(200)}
    assert len(held) == 8
    assert not held & trained


TEMPLATE = set(
    """What is the code of Which which opens Give only Code The did sell sold Who bought from to Where in How
    much get for coins When on On day phone has lives live does job works as a pet keep keeps shelf stock
    price""".split()
)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_can_be_read_from_one_line_of_the_ledger(kind: type[Kind]) -> None:
    for seed in range(40):
        ledger = make_ledger(Random(f"check:{seed}"), 400, absent_rate=0.3, kind=kind)
        lines = ledger.body.split("\n")[1:]
        for turn in ledger.turns:
            key = turn.answer.removesuffix(" is not in the ledger.").removeprefix("The ")
            if turn.answer.endswith(" is not in the ledger."):
                assert key in turn.question
                subject = re.compile(rf"\b{key}( is| sold| lives| works| opens|:| the code)")
                assert not any(subject.search(line) for line in lines), turn
            else:
                facts = set(re.findall(r"\w+", f"{turn.question} {turn.answer}")) - TEMPLATE
                assert facts
                assert any(facts <= set(re.findall(r"\w+", line)) for line in lines), turn


def test_ledgers_are_as_long_as_they_say(tokenizer: Tokenizer) -> None:
    """Coined names take more tokens than estimated: single ledgers may be a quarter too long."""
    for length in (128, 512, 2048):
        sizes = [len(encode(tokenizer, ledger.segments()).ids) for ledger in held_out(length, 8)]
        assert 0.75 * length <= min(sizes) <= max(sizes) <= 1.25 * length
        assert abs(np.mean(sizes) - length) < 0.15 * length


def test_prompts_grow_by_turns_and_end_where_the_answer_starts() -> None:
    ledger = held_out(512, 1)[0]
    prompts = ledger.prompts()
    assert len(prompts) == len(ledger.turns) > 1
    assert prompts[0].startswith(ledger.prefix)
    for index, turn in enumerate(ledger.turns[:-1]):
        assert prompts[index].endswith(f"{turn.question}{STOP}\n<|im_start|>assistant\n")
        assert prompts[index + 1].startswith(prompts[index] + turn.answer + STOP)


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


def test_keys_run_out_with_an_error_instead_of_a_repeat() -> None:
    source = Codes(Random(0))

    def exhaust() -> None:
        for _ in range(10_000):
            source.fresh()

    with pytest.raises(KeysExhausted, match="no unused key left"):
        exhaust()
    assert len(source.used) > 500


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
    """Training takes a second and gives the shipped file, to the byte of its contents."""
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
