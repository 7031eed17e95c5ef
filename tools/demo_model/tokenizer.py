"""The demo model's byte-level BPE tokenizer, trained on the model's training texts."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_model.tasks import filler
from octavo_lab.bench.ledgers import words
from octavo_lab.bench.ledgers.documents import make_ledger
from octavo_lab.bench.ledgers.words import END, START, STOP, joined

VOCAB_SIZE = 1536

# Qwen's pattern, but digits are split into pairs (" 4821" is " 48", "21"). A pair is nearly unique in
# a short ledger, so it is much easier to look up than a digit.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus(seed: int, documents: int) -> Iterator[str]:
    """Yield ledgers and fillers, then all words and two-digit numbers often enough to become tokens."""
    rng = Random(f"tokenizer:{seed}")
    for index in range(documents):
        if index % 2:
            yield joined(make_ledger(rng, rng.choice((128, 256, 400))).segments())
        else:
            yield joined(filler(rng))
    pools = words.FIRST + words.LAST + words.CITY + words.ADJECTIVE + words.PLACE + words.ITEM
    for word in pools + words.JOB + words.PET + words.FEELING + words.WEATHER:
        yield f"{word} {word} {word}s {word}:\n" * 40
    for value in range(100):
        yield f" {value} {value:02}{value:02}\n" * 40


def train_tokenizer(vocab_size: int = VOCAB_SIZE, seed: int = 0, documents: int = 6000) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, START, STOP],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, documents), trainer)
    return tokenizer
