"""How the plain model is trained: its start, its batches and its loss."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from random import Random
from typing import ClassVar

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from demo_model.batches import Example, make_batch
from demo_model.network import ModelConfig, Qwen3
from demo_model.planting import plant_induction
from octavo_lab.bench.ledgers.documents import make_ledger
from octavo_lab.bench.ledgers.words import ANSWER_WEIGHT, Segment

PROBE_LENGTHS, PROBE_LEDGERS = (256, 512, 1024), 8


class PlainRecipe:
    defaults: ClassVar[dict[str, float]] = {"steps": 2000, "tokens": 8192, "threads": 2}
    small = ("embed",)

    def __init__(self, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
        self.model = Qwen3(ModelConfig(vocab_size=tokenizer.get_vocab_size()))
        if not options.plain_start:
            plant_induction(self.model, options.seed)
        self._options = options
        self._batches: Iterator[Example] | None = None

    def batch(self, step: int, progress: float) -> Example:  # noqa: ARG002
        if self._batches is None:
            loader = torch.utils.data.DataLoader(
                _Batches(self._options, step), batch_size=None, num_workers=1
            )
            self._batches = iter(loader)
        return next(self._batches)

    def loss(self, ids: Tensor, weights: Tensor, step: int) -> tuple[Tensor, float]:  # noqa: ARG002
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(ids[:, :-1])
        each = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        weight = weights[:, 1:].flatten()
        answers = each.detach()[weight == ANSWER_WEIGHT].mean().item()
        return (each * weight).sum() / weight.sum(), answers

    def probes(self) -> Iterator[tuple[str, list[Segment]]]:
        for length in PROBE_LENGTHS:
            for index in range(PROBE_LEDGERS):
                rng = Random(f"probe:{length}:{index}")
                yield str(length), make_ledger(rng, length, share=0.7).segments()


class _Batches(torch.utils.data.IterableDataset[Example]):
    def __init__(self, options: argparse.Namespace, first: int) -> None:
        self._options, self._first = options, first

    def __iter__(self) -> Iterator[Example]:
        options, step = self._options, self._first
        tokenizer = Tokenizer.from_file(str(options.run / "tokenizer.json"))
        while True:
            progress = step / options.steps
            yield make_batch(
                tokenizer, seed=options.seed, step=step, progress=progress, tokens=options.tokens
            )
            step += 1
