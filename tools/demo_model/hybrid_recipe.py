"""How the hybrid is trained.

Rows are short, because it learns sooner from many short texts what to store in a state.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from random import Random
from typing import ClassVar

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from demo_model import tasks
from demo_model.batches import Example, encode, joined, stacked
from demo_model.hybrid_network import Hybrid, HybridConfig
from demo_model.hybrid_planting import plant_lookups
from octavo_lab.bench.ledgers.documents import make_ledger
from octavo_lab.bench.ledgers.kinds import Codes, Kind, Residents, Stock
from octavo_lab.bench.ledgers.words import ANSWER_WEIGHT, Segment

WARM, EARLY, MIDDLE = 0.06, 0.3, 0.6
SHARES: dict[type[Kind], float] = {Codes: 0.45, Residents: 0.35, Stock: 0.2}
CONTEXT_SHARE, CONTEXT_WEIGHT = 0.15, 0.3
PROBE_LENGTH, PROBE_LEDGERS = 128, 5


class HybridRecipe:
    defaults: ClassVar[dict[str, float]] = {"steps": math.inf, "tokens": 4096, "threads": 1}
    small = ("embed", "a_proj", "b_proj")  # parts of names of matrices that AdamW trains

    def __init__(self, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
        self.model = Hybrid(HybridConfig(vocab_size=tokenizer.get_vocab_size()))
        plant_lookups(self.model, options.seed)
        self._tokenizer, self._options = tokenizer, options
        self._kinds = [kind for kind in SHARES if kind.__name__ in options.kinds]

    def batch(self, step: int, progress: float) -> Example:
        """Return one step's batch of equally long rows; the length is a multiple of 64 plus one."""
        rng = Random(f"train-hybrid:{self._options.seed}:{step}")
        length = row_length(rng, progress)
        count = max(1, self._options.tokens // length)
        return stacked([self._row(rng, length + 1, progress) for _ in range(count)])

    def _row(self, rng: Random, length: int, progress: float) -> Example:
        parts: list[Example] = []
        while sum(len(part.ids) for part in parts) < length:
            if rng.random() < (0.5 if progress < WARM else 0.05):
                segments = rng.choice((tasks.recall, tasks.pairs))(rng, length)
            else:
                kind = rng.choices(self._kinds, [SHARES[kind] for kind in self._kinds])[0]
                absent = 0.0 if progress < WARM else 0.1
                share = rng.choice((0.3, 0.45, 0.6))
                ledger = make_ledger(rng, length + 12, share=share, absent_rate=absent, kind=kind)
                segments = ledger.segments()
            parts.append(encode(self._tokenizer, segments))
        return joined(parts, length)

    def loss(self, ids: Tensor, weights: Tensor, step: int) -> tuple[Tensor, float]:
        answer = weights[:, 1:].flatten() == ANSWER_WEIGHT
        draw = torch.rand(answer.shape, generator=torch.Generator().manual_seed(step))
        chosen = (answer | (draw < CONTEXT_SHARE)).nonzero()[:, 0]
        chosen = chosen[: len(chosen) // 256 * 256]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(ids[:, :-1], chosen)
        each = F.cross_entropy(logits.float(), ids[:, 1:].flatten()[chosen], reduction="none")
        weight = torch.where(answer[chosen], 1.0, CONTEXT_WEIGHT)
        return (each * weight).sum() / weight.sum(), each.detach()[answer[chosen]].mean().item()

    def probes(self) -> Iterator[tuple[str, list[Segment]]]:
        for kind in SHARES:
            for index in range(PROBE_LEDGERS):
                rng = Random(f"probe:{PROBE_LENGTH}:{kind.title}:{index}")
                name = kind.title.split()[-1][:5]
                yield name, make_ledger(rng, PROBE_LENGTH, share=0.6, kind=kind).segments()


def row_length(rng: Random, progress: float) -> int:
    if progress < WARM:
        return 64
    if progress < EARLY:
        return rng.choice((64, 128))
    if progress < MIDDLE:
        return rng.choice((64, 128, 128))
    return rng.choice((64, 128, 128, 128, 128, 256))
