"""Words and random numbers for all texts of the demo model.

All numbers are random, so questions can be answered only from the context. The order of the draws must not
change, because it determines the documents.
"""

from __future__ import annotations

import re
from random import Random

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# A segment of training text with the weight of its tokens in the loss. Segments end at special tokens,
# so encoding them separately gives the ids of the whole text.
Segment = tuple[str, float]
CONTEXT_WEIGHT, PROSE_WEIGHT, ANSWER_WEIGHT = 0.1, 0.4, 1.0

FIRST = """Mara Otto Lena Hugo Iris Noel Vera Emil Nora Luca Ada Felix Clara Jonas Petra Simon Ruth
Oscar Elsa Bruno Ines Kurt Mila Anton Rosa Pavel Greta Samir Dora Victor Alma Tomas Edda Rafael Lydia
Marco Yara Stefan Tessa Boris Hanna Cyrus Maud Idris Paula Leon Sofia Walter""".split()
LAST = """Hart Lund Berg Stone Marsh Vega Brandt Novak Silva Moreau Rossi Weber Quist Frost Hale
Arden Holt Kerr Bloom Ferro Ibsen Lark Dunn Pryce Sorel Tamm Unger Voss Wynn Zeller Crane Dale""".split()
CITY = """Oslo Paris Lima Cairo Quito Delhi Turin Porto Bergen Lyon Malmo Kyoto Dakar Tunis Riga
Bern Leeds Perth Havana Seoul Ghent Split Basel Cork""".split()
ADJECTIVE = """amber iron copper silver green red blue white black small heavy broken narrow wooden
golden quiet round ancient hollow bright northern southern crooked frozen painted velvet marble dusty
plain striped secret upper lower outer inner spare""".split()
PLACE = """gate door vault tower bridge cellar garden harbor stable attic library kitchen chapel
office tunnel market cabin station depot archive mill well hall barn""".split()
ITEM = """lamp chair clock kettle rope hinge mirror basket candle hammer ladder barrel drum violin
carpet bottle lantern shovel bucket button compass ring teapot saddle bell anchor needle spoon""".split()
JOB = """baker smith farmer weaver pilot nurse painter sailor teacher tailor potter carpenter judge
gardener miller printer""".split()
PET = "cat dog parrot goat rabbit turtle horse pony falcon goose hen ferret".split()
FEELING = "happy tired proud curious calm nervous hungry glad worried cheerful".split()
WEATHER = "rain wind snow fog sun frost thunder".split()
PAIRS_OF_DIGITS = [str(value) for value in range(10, 100)]

_ONSETS = "b br d dr f g gr h j k kl l m n p pr r s st t tr v w z sh th".split()
_VOWELS = "a e i o u ai ea oa".split()
_CODAS = ["", "", "n", "r", "l", "s", "m", "t", "k", "nd", "x"]


def coined(rng: Random) -> str:
    """Return a word spelled from random syllables, capitalised like a name."""
    syllables = rng.choice((2, 2, 3))
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + (rng.choice(_CODAS) if i == syllables - 1 else "")
        for i in range(syllables)
    ).capitalize()


def number(rng: Random, digits: int) -> str:
    """Return a number of exactly ``digits`` digits."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def quantity(rng: Random) -> str:
    """Return a number below 10, 100 or 1000, with equal chances."""
    return str(rng.randrange(2, rng.choice((10, 100, 1000))))


def estimated_tokens(text: str) -> int:
    """Estimate the token count without a tokenizer, within a few per cent."""
    return len(re.findall(r"[A-Za-z]+|\d{1,2}|[^\w\s]", text))


def ask(question: str) -> str:
    """Return a chat of one turn, which ends where the answer to ``question`` begins."""
    return f"{START}user\n{question}{STOP}\n{START}assistant\n"


def joined(segments: list[Segment]) -> str:
    return "".join(text for text, _ in segments)
