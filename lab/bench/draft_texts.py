"""Synthetic texts for ``octavo bench speculate`` that are easy or hard to draft.

copy         long pieces of the prompt, in another order
edit         the prompt again, with one in 25 tokens changed
form         records with repeated field names and new values
json         records as JSON under a schema
ledger       one-sentence answers about a ledger in the prompt
adversarial  tokens from a small alphabet; matches are frequent and predict nothing
free         tokens that never repeat
own          text that the model generates
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple, TypeAlias

import numpy as np

from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.core.engine_core import EngineCore

from .ledgers.documents import make_ledger

Rng: TypeAlias = np.random.Generator
Dictated: TypeAlias = tuple[list[int], list[int]]
"""A prompt, and the text that the model is made to say."""


class Text(NamedTuple):
    make: Callable[[Rng, list[int], int, EngineCore], Dictated]
    structured: StructuredOutput | None = None


def _copy(rng: Rng, prompt: list[int], length: int, core: EngineCore) -> Dictated:
    said: list[int] = []
    while len(said) < length:
        start = int(rng.integers(0, max(1, len(prompt) - 40)))
        said += [
            *rng.integers(300, core.info.vocab_size, 2).tolist(),
            *prompt[start : start + int(rng.integers(30, 90))],
        ]
    return prompt, said[:length]


def _edit(rng: Rng, prompt: list[int], length: int, core: EngineCore) -> Dictated:
    said = (prompt * -(-length // len(prompt)))[:length]
    for place in np.flatnonzero(rng.random(length) < 1 / 25).tolist():
        said[place] = int(rng.integers(300, core.info.vocab_size))
    return prompt, said


def _form(rng: Rng, prompt: list[int], length: int, core: EngineCore) -> Dictated:
    names = [rng.integers(300, core.info.vocab_size, 4).tolist() for _ in range(6)]
    said: list[int] = []
    while len(said) < len(prompt) + length:
        for name in names:
            said += [*name, *rng.integers(300, core.info.vocab_size, int(rng.integers(1, 4))).tolist()]
    return said[: len(prompt)], said[len(prompt) : len(prompt) + length]


def _adversarial(rng: Rng, prompt: list[int], length: int, core: EngineCore) -> Dictated:
    alphabet = rng.integers(300, core.info.vocab_size, 6)
    said: list[int] = alphabet[rng.integers(0, len(alphabet), len(prompt) + length)].tolist()
    return said[: len(prompt)], said[len(prompt) :]


def _free(rng: Rng, prompt: list[int], length: int, core: EngineCore) -> Dictated:
    return prompt, rng.integers(300, core.info.vocab_size, length).tolist()


FIELDS = {
    "customer_name": "string",
    "account_number": "integer",
    "opening_balance": "number",
    "is_overdrawn": "boolean",
}
LEDGER = StructuredOutput(
    json_schema={
        "type": "array",
        "items": {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in FIELDS.items()},
            "required": list(FIELDS),
            "additionalProperties": False,
        },
    }
)


def _json(rng: Rng, prompt: list[int], length: int, core: EngineCore) -> Dictated:
    said: list[int] = []
    num_records = 0
    while len(said) < length:
        num_records += max(1, length // 32)
        records = [
            {
                "customer_name": "".join(map(chr, rng.integers(97, 123, 6).tolist())),
                "account_number": int(rng.integers(10**5)),
                "opening_balance": int(rng.integers(10**6)) / 100,
                "is_overdrawn": bool(rng.integers(2)),
            }
            for _ in range(num_records)
        ]
        said = core.tokenizer.encode(json.dumps(records))
    return prompt, said[:length]


def _ledger(rng: Rng, prompt: list[int], length: int, core: EngineCore) -> Dictated:
    ledger = make_ledger(Random(int(rng.integers(2**32))), len(prompt), share=0.7)
    turn = int(rng.integers(len(ledger.turns)))
    encode = core.tokenizer.encode
    asked = encode(ledger.prompts()[turn], add_special_tokens=False)
    answer = encode(ledger.segments()[2 * turn + 1][0], add_special_tokens=False)
    return asked[-len(prompt) :], answer[:length]


OWN = "own"
TEXTS: Mapping[str, Text] = {
    "copy": Text(_copy),
    "edit": Text(_edit),
    "form": Text(_form),
    "json": Text(_json, LEDGER),
    "ledger": Text(_ledger),
    "adversarial": Text(_adversarial),
    "free": Text(_free),
    OWN: Text(lambda _rng, prompt, _length, _core: (prompt, [])),
}
