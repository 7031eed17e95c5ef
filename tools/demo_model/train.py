"""Train the demo model, or the hybrid one. Resumes from RUN/checkpoint.pt when there is one.

    cd tools && python -m demo_model.train --run RUN --minutes 21 --steps 2500 --tokens 5120
    cd tools && python -m demo_model.train --hybrid --run RUN --minutes 38

The learning rate follows the used share of the time or step budget. Muon trains hidden matrices, AdamW
trains embeddings and norms.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from demo_model.batches import encode
from demo_model.checkpoint import State
from demo_model.hybrid_recipe import SHARES, HybridRecipe
from demo_model.plain_recipe import PlainRecipe
from demo_model.tokenizer import train_tokenizer
from octavo_lab.bench.ledgers.words import ANSWER_WEIGHT

SHIPPED_TOKENIZER = Path(__file__).resolve().parents[2] / "engine" / "demo" / "tokenizer.json"
REPORT_STEPS, PROBE_STEPS = 25, 100
Recipe: TypeAlias = PlainRecipe | HybridRecipe


@torch.no_grad()
def probe(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the share of questions that are answered exactly after correct earlier answers."""
    right, total = Counter[str](), Counter[str]()
    for name, segments in recipe.probes():
        ids = torch.from_numpy(encode(tokenizer, segments).ids)
        padded = F.pad(ids[:-1], (0, -(len(ids) - 1) % 128))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hits = recipe.model(padded[None]).argmax(-1)[0, : len(ids) - 1] == ids[1:]
        start = 0
        for text, weight in segments:
            stop = start + len(encode(tokenizer, [(text, weight)]).ids)
            if weight == ANSWER_WEIGHT:
                total[name] += 1
                right[name] += bool(hits[start - 1 : stop - 1].all())
            start = stop
    return {name: round(right[name] / total[name], 3) for name in total}


def build_optimizers(recipe: Recipe, rate: float) -> list[torch.optim.Optimizer]:
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in recipe.model.named_parameters():
        is_small = any(part in name for part in recipe.small)
        (matrices if parameter.ndim == 2 and not is_small else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=10 * rate, weight_decay=0.01, momentum=0.95, ns_steps=5),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(state: State, recipe: Recipe, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
    first, begin = state.step, time.monotonic()
    saved_at = begin
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    bases = [10 * options.rate, options.rate]
    answers: list[float] = []
    while True:
        minutes = (time.monotonic() - begin) / 60
        used = max(minutes / options.minutes, (state.step - first) / max(1, options.steps - first))
        if used >= 1:
            break
        warm = min(1.0, (state.step - first + 1) / options.warmup)
        falling = min(1.0, 2.0 * (1 - used)) if options.linear else 0.5 * (1 + math.cos(math.pi * used))
        for group, base in zip(groups, bases, strict=True):
            group["lr"] = base * warm * (options.floor + (1 - options.floor) * falling)
        batch = recipe.batch(state.step, options.start + (1 - options.start) * used)
        ids = torch.from_numpy(batch.ids)
        loss, answer_loss = recipe.loss(ids, torch.from_numpy(batch.weights), state.step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
        for optimizer in state.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        state.step, state.tokens = state.step + 1, state.tokens + ids.numel()
        answers.append(answer_loss)
        if state.step % REPORT_STEPS == 0:
            entry = {"step": state.step, "tokens": state.tokens, "minutes": round(minutes, 2)}
            entry |= {"loss": round(loss.item(), 4), "length": ids.shape[1]}
            entry["answer_loss"] = round(sum(answers) / len(answers), 4)
            if state.step % PROBE_STEPS == 0:
                entry |= {f"exact_{name}": share for name, share in probe(recipe, tokenizer).items()}
            print(json.dumps(entry), flush=True)
            with (options.run / "log.jsonl").open("a") as log:
                log.write(json.dumps(entry) + "\n")
            answers.clear()
        if time.monotonic() - saved_at > 60 * options.save_minutes:
            state.save(options.run / "checkpoint.pt")
            saved_at = time.monotonic()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hybrid", action="store_true", help="train the hybrid model")
    parser.add_argument("--run", type=Path, required=True, help="folder of the checkpoint and the log")
    parser.add_argument("--minutes", type=float, default=30.0, help="wall time of this run")
    parser.add_argument("--steps", type=float, help="planned steps (drives the plain model's curriculum)")
    parser.add_argument("--start", type=float, default=0.0, help="where the hybrid's curriculum starts")
    names = [kind.__name__ for kind in SHARES]
    parser.add_argument("--kinds", nargs="+", choices=names, default=names, help="the hybrid's ledgers")
    parser.add_argument("--linear", action="store_true", help="full rate for half the time, then linear")
    parser.add_argument("--tokens", type=int, help="tokens per step")
    parser.add_argument("--rate", type=float, default=2e-3, help="AdamW's; Muon's is ten times as much")
    parser.add_argument("--floor", type=float, default=0.02, help="final fraction of the rate")
    parser.add_argument("--warmup", type=int, default=40, help="steps")
    parser.add_argument("--save-minutes", type=float, default=1.5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--plain-start", action="store_true", help="start from purely random weights")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, value in (HybridRecipe if options.hybrid else PlainRecipe).defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main() -> None:
    options = parsed()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    options.run.mkdir(parents=True, exist_ok=True)
    file = options.run / "tokenizer.json"
    if options.hybrid:
        shutil.copyfile(SHIPPED_TOKENIZER, file)
    elif not file.exists():
        train_tokenizer().save(str(file))
    tokenizer = Tokenizer.from_file(str(file))
    recipe = (HybridRecipe if options.hybrid else PlainRecipe)(tokenizer, options)
    state = State(recipe.model, build_optimizers(recipe, options.rate))
    if (options.run / "checkpoint.pt").exists():
        state.load(options.run / "checkpoint.pt")
    size = sum(parameter.numel() for parameter in recipe.model.parameters())
    print(f"{size / 1e6:.2f} M parameters, from step {state.step}", flush=True)
    train(state, recipe, tokenizer, options)
    state.save(options.run / "checkpoint.pt")


if __name__ == "__main__":
    main()
