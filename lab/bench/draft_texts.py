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
from typing import NamedTuple

import numpy as np

from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.core.engine_core import EngineCore

from .ledgers.documents import make_ledger


class Text(NamedTuple):
    make: Callable[[np.random.Generator, list[int], int, EngineCore], tuple[list[int], list[int]]]
    structured: StructuredOutput | None = None


def _copy(
    rng: np.random.Generator, prompt: list[int], length: int, core: EngineCore
) -> tuple[list[int], list[int]]:
    said: list[int] = []
    while len(said) < length:
        start = int(rng.integers(0, max(1, len(prompt) - 40)))
        said += [
            *rng.integers(300, core.info.vocab_size, 2).tolist(),
            *prompt[start : start + int(rng.integers(30, 90))],
        ]
    return prompt, said[:length]


def _edit(
    rng: np.random.Generator, prompt: list[int], length: int, core: EngineCore
) -> tuple[list[int], list[int]]:
    said = (prompt * -(-length // len(prompt)))[:length]
    for place in np.flatnonzero(rng.random(length) < 1 / 25).tolist():
        said[place] = int(rng.integers(300, core.info.vocab_size))
    return prompt, said


def _form(
    rng: np.random.Generator, prompt: list[int], length: int, core: EngineCore
) -> tuple[list[int], list[int]]:
    names = [rng.integers(300, core.info.vocab_size, 4).tolist() for _ in range(6)]
    said: list[int] = []
    while len(said) < len(prompt) + length:
        for name in names:
            said += [*name, *rng.integers(300, core.info.vocab_size, int(rng.integers(1, 4))).tolist()]
    return said[: len(prompt)], said[len(prompt) : len(prompt) + length]


def _adversarial(
    rng: np.random.Generator, prompt: list[int], length: int, core: EngineCore
) -> tuple[list[int], list[int]]:
    alphabet = rng.integers(300, core.info.vocab_size, 6)
    said: list[int] = alphabet[rng.integers(0, len(alphabet), len(prompt) + length)].tolist()
    return said[: len(prompt)], said[len(prompt) :]


def _free(
    rng: np.random.Generator, prompt: list[int], length: int, core: EngineCore
) -> tuple[list[int], list[int]]:
    return prompt, rng.integers(300, core.info.vocab_size, length).tolist()


NAMES = ("customer_name", "account_number", "opening_balance", "is_overdrawn")
LEDGER = StructuredOutput(
    json_schema={
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "customer_name": {"type": "string"},
                "account_number": {"type": "integer"},
                "opening_balance": {"type": "number"},
                "is_overdrawn": {"type": "boolean"},
            },
            "required": list(NAMES),
            "additionalProperties": False,
        },
    }
)


def _json(
    rng: np.random.Generator, prompt: list[int], length: int, core: EngineCore
) -> tuple[list[int], list[int]]:
    said: list[int] = []
    num_records = 0
    while len(said) < length:
        num_records += max(1, length // 32)
        records = [
            dict(
                zip(
                    NAMES,
                    (
                        "".join(map(chr, rng.integers(97, 123, 6).tolist())),
                        int(rng.integers(10**5)),
                        int(rng.integers(10**6)) / 100,
                        bool(rng.integers(2)),
                    ),
                    strict=True,
                )
            )
            for _ in range(num_records)
        ]
        said = core.tokenizer.encode(json.dumps(records))
    return prompt, said[:length]


def _ledger(
    rng: np.random.Generator, prompt: list[int], length: int, core: EngineCore
) -> tuple[list[int], list[int]]:
    ledger = make_ledger(Random(int(rng.integers(2**32))), len(prompt), share=0.7)
    turn = int(rng.integers(len(ledger.turns)))
    encode = core.tokenizer.encode
    asked = encode(ledger.prompts()[turn], add_special_tokens=False)
    answer = encode(ledger.segments()[2 * turn + 1][0], add_special_tokens=False)
    return asked[-len(prompt) :], answer[:length]


def _own(
    rng: np.random.Generator,  # noqa: ARG001 - as the others
    prompt: list[int],
    length: int,  # noqa: ARG001
    core: EngineCore,  # noqa: ARG001
) -> tuple[list[int], list[int]]:
    return prompt, []


OWN = "own"
TEXTS: Mapping[str, Text] = {
    "copy": Text(_copy),
    "edit": Text(_edit),
    "form": Text(_form),
    "json": Text(_json, LEDGER),
    "ledger": Text(_ledger),
    "adversarial": Text(_adversarial),
    "free": Text(_free),
    OWN: Text(_own),
}
