from __future__ import annotations

import hashlib
import re
from random import Random

import pytest

from octavo_lab.bench.ledgers.documents import held_out, make_ledger
from octavo_lab.bench.ledgers.kinds import KINDS, Codes, KeysExhausted, Kind
from octavo_lab.bench.ledgers.words import STOP, joined


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_the_published_accuracy_is_about_these_very_documents() -> None:
    """Digests of the held-out ledgers behind the accuracy in the README."""
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


def test_prompts_grow_by_turns_and_end_before_the_answer() -> None:
    ledger = held_out(512, 1)[0]
    prompts = ledger.prompts()
    assert len(prompts) == len(ledger.turns) > 1
    assert prompts[0].startswith(ledger.prefix)
    for index, turn in enumerate(ledger.turns[:-1]):
        assert prompts[index].endswith(f"{turn.question}{STOP}\n<|im_start|>assistant\n")
        assert prompts[index + 1].startswith(prompts[index] + turn.answer + STOP)


def test_keys_run_out_with_an_error_instead_of_a_repeat() -> None:
    source = Codes(Random(0))

    def exhaust() -> None:
        for _ in range(10_000):
            source.fresh()

    with pytest.raises(KeysExhausted, match="no unused key left"):
        exhaust()
    assert len(source.used) > 500
