"""Training batches, determined by seed and step, so that a run can resume exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from demo_model import tasks
from octavo_lab.bench.ledgers.documents import make_ledger
from octavo_lab.bench.ledgers.words import END, Segment

# Shares of the planned steps at which the curriculum changes.
WARM, EARLY, MIDDLE, LATE = 0.06, 0.3, 0.6, 0.88
_SOURCES = ("loop", "pairs", "recall", "echo", "filler", "ledger")
_WARM_SHARES = (0.3, 0.3, 0.15, 0.0, 0.0, 0.25)
_EARLY_SHARES = (0.08, 0.08, 0.14, 0.05, 0.1, 0.55)
_LATER_SHARES = (0.02, 0.02, 0.06, 0.04, 0.1, 0.76)
_DRILLS = {"loop": tasks.loop, "pairs": tasks.pairs, "recall": tasks.recall, "echo": tasks.echo}


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, and the weight of each token in the loss; [T], or [B, T] for a batch."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]


def encode(tokenizer: Tokenizer, segments: list[Segment]) -> Example:
    encoded = tokenizer.encode_batch([text for text, _ in segments], add_special_tokens=False)
    counts = [len(item.ids) for item in encoded]
    ids = np.concatenate([np.array(item.ids, dtype=np.int64) for item in encoded])
    weights = np.repeat(np.array([weight for _, weight in segments], dtype=np.float32), counts)
    return Example(ids, weights)


def make_row(tokenizer: Tokenizer, rng: Random, length: int, progress: float) -> Example:
    parts = [encode(tokenizer, _first_text(rng, length, progress))]
    border = Example(np.array([tokenizer.token_to_id(END)]), np.zeros(1, dtype=np.float32))
    while sum(len(part.ids) for part in parts) < length:
        parts += [border, encode(tokenizer, tasks.filler(rng))]
    return joined(parts, length)


def joined(parts: Sequence[Example], length: int) -> Example:
    return Example(
        np.concatenate([part.ids for part in parts])[:length],
        np.concatenate([part.weights for part in parts])[:length],
    )


def stacked(rows: Sequence[Example]) -> Example:
    return Example(np.stack([row.ids for row in rows]), np.stack([row.weights for row in rows]))


def _first_text(rng: Random, length: int, progress: float) -> list[Segment]:
    warm = progress < WARM
    shares = _WARM_SHARES if warm else _EARLY_SHARES if progress < EARLY else _LATER_SHARES
    source = rng.choices(_SOURCES, shares)[0]
    if source == "ledger":
        share = rng.choice((0.35, 0.5, 0.6)) if length <= 520 else rng.choice((0.5, 0.65, 0.8))
        return make_ledger(rng, length, share=share, absent_rate=0.0 if warm else 0.12).segments()
    if source == "filler":
        return tasks.filler(rng)
    return _DRILLS[source](rng, min(length, 640))


def row_length(rng: Random, progress: float) -> int:
    if progress < WARM:
        return rng.choice((64, 128))
    if progress < EARLY:
        return rng.choice((128, 192, 256))
    if progress < MIDDLE:
        return rng.choice((128, 256, 512, 1024))
    if progress < LATE:
        return rng.choice((128, 256, 512, 1024, 1024, 2240))
    return rng.choice((256, 1024, 2240, 2240))


def make_batch(tokenizer: Tokenizer, *, seed: int, step: int, progress: float, tokens: int) -> Example:
    """Return the batch of one step: about ``tokens`` tokens in rows of equal length.

    progress   share of the planned steps that are done
    """
    rng = Random(f"train:{seed}:{step}")
    length = row_length(rng, progress)
    return stacked([make_row(tokenizer, rng, length + 1, progress) for _ in range(max(1, tokens // length))])
