"""Train the hybrid demo model. Resumes from RUN/checkpoint.pt when there is one.

    cd tools && python -m demo_model.train_hybrid --run RUN --minutes 38

The learning rate and the curriculum follow the used share of the time. Rows are short, because the model
learns sooner from many short texts what to store in a state.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from demo_model import tasks
from demo_model.batches import Example, encode
from demo_model.checkpoint import State
from demo_model.hybrid_network import Hybrid, HybridConfig
from demo_model.hybrid_planting import plant_lookups
from octavo_lab.bench.ledgers.documents import make_ledger
from octavo_lab.bench.ledgers.kinds import Codes, Kind, Residents, Stock
from octavo_lab.bench.ledgers.words import ANSWER_WEIGHT

TOKENIZER = Path(__file__).resolve().parents[2] / "engine" / "demo" / "tokenizer.json"
WARM, EARLY, MIDDLE = 0.06, 0.3, 0.6
SHARES: dict[type[Kind], float] = {Codes: 0.45, Residents: 0.35, Stock: 0.2}
CONTEXT_SHARE, CONTEXT_WEIGHT = 0.15, 0.3
PROBE_LENGTHS, PROBE_LEDGERS = (128,), 5


def make_row(
    tokenizer: Tokenizer, rng: Random, length: int, progress: float, kinds: Sequence[type[Kind]]
) -> Example:
    parts: list[Example] = []
    while sum(len(part.ids) for part in parts) < length:
        if rng.random() < (0.5 if progress < WARM else 0.05):
            segments = rng.choice((tasks.recall, tasks.pairs))(rng, length)
        else:
            kind = rng.choices(kinds, [SHARES[kind] for kind in kinds])[0]
            absent = 0.0 if progress < WARM else 0.1
            share = rng.choice((0.3, 0.45, 0.6))
            segments = make_ledger(rng, length + 12, share=share, absent_rate=absent, kind=kind).segments()
        parts.append(encode(tokenizer, segments))
    return Example(
        np.concatenate([part.ids for part in parts])[:length],
        np.concatenate([part.weights for part in parts])[:length],
    )


def row_length(rng: Random, progress: float) -> int:
    if progress < WARM:
        return 64
    if progress < EARLY:
        return rng.choice((64, 128))
    if progress < MIDDLE:
        return rng.choice((64, 128, 128))
    return rng.choice((64, 128, 128, 128, 128, 256))


def make_batch(
    tokenizer: Tokenizer, *, seed: int, step: int, progress: float, tokens: int, kinds: Sequence[type[Kind]]
) -> Example:
    """Return one step's batch of equally long rows; the length is a multiple of 64 plus one."""
    rng = Random(f"train-hybrid:{seed}:{step}")
    length = row_length(rng, progress)
    rows = [make_row(tokenizer, rng, length + 1, progress, kinds) for _ in range(max(1, tokens // length))]
    return Example(np.stack([row.ids for row in rows]), np.stack([row.weights for row in rows]))


def build_optimizers(model: Hybrid, rate: float) -> list[torch.optim.Optimizer]:
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        small = any(part in name for part in ("embed", "a_proj", "b_proj"))
        (matrices if parameter.ndim == 2 and not small else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=10 * rate, weight_decay=0.01, momentum=0.95, ns_steps=5),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train_step(state: State[Hybrid], batch: Example) -> float:
    ids, weights = torch.from_numpy(batch.ids), torch.from_numpy(batch.weights)
    answer = weights[:, 1:].flatten() == ANSWER_WEIGHT
    draw = torch.rand(answer.shape, generator=torch.Generator().manual_seed(state.step))
    chosen = (answer | (draw < CONTEXT_SHARE)).nonzero()[:, 0]
    chosen = chosen[: len(chosen) // 256 * 256]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = state.model(ids[:, :-1], chosen)
    each = F.cross_entropy(logits.float(), ids[:, 1:].flatten()[chosen], reduction="none")
    weight = torch.where(answer[chosen], 1.0, CONTEXT_WEIGHT)
    ((each * weight).sum() / weight.sum()).backward()
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    for optimizer in state.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.tokens += ids.numel()
    return each.detach()[answer[chosen]].mean().item()


def probe_ledgers(length: int) -> Iterator[tuple[type[Kind], list[tuple[str, float]]]]:
    for kind in SHARES:
        for index in range(PROBE_LEDGERS):
            rng = Random(f"probe:{length}:{kind.title}:{index}")
            yield kind, make_ledger(rng, length, share=0.6, kind=kind).segments()


@torch.no_grad()
def probe(model: Hybrid, tokenizer: Tokenizer, length: int) -> dict[str, float]:
    """Return the share of questions answered exactly after correct earlier answers, by kind of ledger."""
    right, total = dict.fromkeys(SHARES, 0), dict.fromkeys(SHARES, 0)
    for kind, segments in probe_ledgers(length):
        ids = torch.from_numpy(encode(tokenizer, segments).ids)
        padded = F.pad(ids[:-1], (0, -(len(ids) - 1) % 128))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hits = model(padded[None]).argmax(-1)[0, : len(ids) - 1] == ids[1:]
        start = 0
        for segment in segments:
            stop = start + len(encode(tokenizer, [segment]).ids)
            if segment[1] == ANSWER_WEIGHT:
                total[kind] += 1
                right[kind] += bool(hits[start - 1 : stop - 1].all())
            start = stop
    return {kind.title.split()[-1][:5]: round(right[kind] / total[kind], 2) for kind in SHARES}


def report(entry: dict[str, object], log: Path) -> None:
    line = json.dumps(entry)
    print(line, flush=True)
    with log.open("a") as file:
        file.write(line + "\n")


def train(state: State[Hybrid], tokenizer: Tokenizer, options: argparse.Namespace) -> None:
    first, begin = state.step, time.monotonic()
    saved_at = begin
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    bases = [10 * options.rate, options.rate]
    losses: list[float] = []
    while (used := (time.monotonic() - begin) / 60 / options.minutes) < 1:
        warm = min(1.0, (state.step - first + 1) / options.warmup)
        falling = min(1.0, 2.0 * (1 - used)) if options.linear else 0.5 * (1 + math.cos(math.pi * used))
        for group, base in zip(groups, bases, strict=True):
            group["lr"] = base * warm * (options.floor + (1 - options.floor) * falling)
        progress = options.start + (1 - options.start) * used
        batch = make_batch(
            tokenizer,
            seed=options.seed,
            step=state.step,
            progress=progress,
            tokens=options.tokens,
            kinds=[kind for kind in SHARES if kind.__name__ in options.kinds],
        )
        losses.append(train_step(state, batch))
        if state.step % 50 == 0:
            entry: dict[str, object] = {"step": state.step, "tokens": state.tokens}
            entry |= {"minutes": round(used * options.minutes, 2), "answer_loss": sum(losses) / len(losses)}
            if state.step % 200 == 0:
                entry |= {f"exact_{n}": probe(state.model, tokenizer, n) for n in PROBE_LENGTHS}
            report(entry, options.run / "log.jsonl")
            losses.clear()
        if time.monotonic() - saved_at > 60 * options.save_minutes:
            state.save(options.run / "checkpoint.pt")
            saved_at = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of the checkpoint and the log")
    parser.add_argument("--minutes", type=float, default=38.0, help="wall time of this run")
    parser.add_argument("--start", type=float, default=0.0, help="where in the curriculum this run starts")
    names = [kind.__name__ for kind in SHARES]
    parser.add_argument("--kinds", nargs="+", choices=names, default=names, help="of ledgers")
    parser.add_argument("--linear", action="store_true", help="full rate for half the time, then linear")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per step")
    parser.add_argument("--rate", type=float, default=2e-3, help="AdamW's; Muon's is ten times as much")
    parser.add_argument("--floor", type=float, default=0.02, help="final fraction of the rate")
    parser.add_argument("--warmup", type=int, default=40, help="steps")
    parser.add_argument("--save-minutes", type=float, default=1.5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    options.run.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(TOKENIZER, options.run / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    model = Hybrid(HybridConfig(vocab_size=tokenizer.get_vocab_size()))
    plant_lookups(model, options.seed)
    state = State(model, build_optimizers(model, options.rate))
    if (options.run / "checkpoint.pt").exists():
        state.load(options.run / "checkpoint.pt")
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size / 1e6:.2f} M parameters, from step {state.step}", flush=True)
    train(state, tokenizer, options)
    state.save(options.run / "checkpoint.pt")


if __name__ == "__main__":
    main()
