"""Train the demo model. Resumes from RUN/checkpoint.pt when there is one.

    cd tools && python -m demo_model.train --run RUN --minutes 21 --steps 2500 --tokens 5120

The cosine schedule follows the used share of the time or step budget. Muon trains hidden matrices, AdamW
trains embeddings and norms.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from demo_model.batches import encode, make_batch
from demo_model.checkpoint import State
from demo_model.network import ModelConfig, Qwen3
from demo_model.planting import plant_induction
from demo_model.tokenizer import train_tokenizer
from octavo_lab.bench.ledgers.documents import make_ledger
from octavo_lab.bench.ledgers.words import ANSWER_WEIGHT

PROBE_LENGTHS, PROBE_LEDGERS = (256, 512, 1024), 8


class Batches(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, run: Path, *, seed: int, first: int, planned: int, tokens: int) -> None:
        self.run, self.seed, self.first, self.planned, self.tokens = run, seed, first, planned, tokens

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        tokenizer = Tokenizer.from_file(str(self.run / "tokenizer.json"))
        step = self.first
        while True:
            progress = step / self.planned
            batch = make_batch(tokenizer, seed=self.seed, step=step, progress=progress, tokens=self.tokens)
            yield torch.from_numpy(batch.ids), torch.from_numpy(batch.weights)
            step += 1


@dataclass(frozen=True, slots=True)
class Loss:
    """The weighted loss that training minimizes, and the mean loss over answer tokens only."""

    weighted: Tensor
    answers: float


def loss_of(model: Qwen3, ids: Tensor, weights: Tensor) -> Loss:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids[:, :-1])
    each = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    weight = weights[:, 1:].flatten()
    answers = each.detach()[weight == ANSWER_WEIGHT].mean().item()
    return Loss((each * weight).sum() / weight.sum(), answers)


@torch.no_grad()
def probe(model: Qwen3, tokenizer: Tokenizer, length: int) -> float:
    """Return the share of questions that are answered exactly, over a few ledgers of ``length`` tokens."""
    right = total = 0
    for index in range(PROBE_LEDGERS):
        segments = make_ledger(Random(f"probe:{length}:{index}"), length, share=0.7).segments()
        start = 0
        ids = torch.from_numpy(encode(tokenizer, segments).ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hits = model(ids[None, :-1]).argmax(-1)[0] == ids[1:]
        for segment in segments:
            stop = start + len(encode(tokenizer, [segment]).ids)
            if segment[1] == ANSWER_WEIGHT:
                total += 1
                right += bool(hits[start - 1 : stop - 1].all())
            start = stop
    return right / total


def build_optimizers(model: Qwen3, rate: float) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=10 * rate, weight_decay=0.01, momentum=0.95, ns_steps=5),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def start(options: argparse.Namespace) -> tuple[State[Qwen3], Tokenizer]:
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    options.run.mkdir(parents=True, exist_ok=True)
    tokenizer_file = options.run / "tokenizer.json"
    if not tokenizer_file.exists():
        train_tokenizer().save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    model = Qwen3(ModelConfig(vocab_size=tokenizer.get_vocab_size()))
    if not options.plain_start:
        plant_induction(model, options.seed)
    state = State(model, build_optimizers(model, options.rate))
    if (options.run / "checkpoint.pt").exists():
        state.load(options.run / "checkpoint.pt")
    return state, tokenizer


def report(state: State[Qwen3], tokenizer: Tokenizer, entry: dict[str, float], log: Path) -> None:
    entry = {"step": state.step, "tokens": state.tokens} | entry
    if state.step % 100 == 0:
        entry |= {f"exact_{n}": round(probe(state.model, tokenizer, n), 3) for n in PROBE_LENGTHS}
    line = json.dumps(entry)
    print(line, flush=True)
    with log.open("a") as file:
        file.write(line + "\n")


def train_step(state: State[Qwen3], ids: Tensor, weights: Tensor) -> Loss:
    loss = loss_of(state.model, ids, weights)
    loss.weighted.backward()
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    for optimizer in state.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.tokens += ids.numel()
    return loss


def train(state: State[Qwen3], tokenizer: Tokenizer, options: argparse.Namespace) -> None:
    first, begin = state.step, time.monotonic()
    saved_at = begin
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    bases = [10 * options.rate, options.rate]
    source = Batches(
        options.run, seed=options.seed, first=first, planned=options.steps, tokens=options.tokens
    )
    answers: list[float] = []
    for ids, weights in torch.utils.data.DataLoader(source, batch_size=None, num_workers=1):
        minutes = (time.monotonic() - begin) / 60
        used = max(minutes / options.minutes, (state.step - first) / max(1, options.steps - first))
        if used >= 1:
            break
        warm = min(1.0, (state.step - first + 1) / options.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * used))
        for group, base in zip(groups, bases, strict=True):
            group["lr"] = base * warm * (options.floor + (1 - options.floor) * cosine)
        loss = train_step(state, ids, weights)
        answers.append(loss.answers)
        if state.step % 25 == 0:
            entry = {"minutes": round(minutes, 2), "loss": round(loss.weighted.item(), 4)}
            entry |= {"answer_loss": round(sum(answers) / len(answers), 4), "length": ids.shape[1]}
            report(state, tokenizer, entry, options.run / "log.jsonl")
            answers.clear()
        if time.monotonic() - saved_at > 60 * options.save_minutes:
            state.save(options.run / "checkpoint.pt")
            saved_at = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of the checkpoint and the log")
    parser.add_argument("--minutes", type=float, default=30.0, help="wall time of this run")
    parser.add_argument("--steps", type=int, default=2000, help="planned steps (drives the curriculum)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per step")
    parser.add_argument("--rate", type=float, default=2e-3, help="AdamW's; Muon's is ten times as much")
    parser.add_argument("--floor", type=float, default=0.02, help="final fraction of the rate")
    parser.add_argument("--warmup", type=int, default=40, help="steps")
    parser.add_argument("--save-minutes", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plain-start", action="store_true", help="start from purely random weights")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    state, tokenizer = start(options)
    size = sum(parameter.numel() for parameter in state.model.parameters())
    print(f"{size / 1e6:.2f} M parameters, from step {state.step}", flush=True)
    train(state, tokenizer, options)
    state.save(options.run / "checkpoint.pt")


if __name__ == "__main__":
    main()
