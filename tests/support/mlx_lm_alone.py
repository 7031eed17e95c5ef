"""mlx-lm without Octavo: random weights, greedy tokens, log probabilities.

A program; each input line is a job::

    {"folder": ..., "config": {...}, "prompts": [[1, 2], ...], "num_tokens": 4,
     "dtype": "float32", "seed": 0, "pages": "float16"}

It writes a model of this configuration to the folder, computes the prompts one by one with mlx-lm's caches,
and prints {"tokens": [[..], ..]} or {"error": ...}. As in Octavo, K and V are rounded to ``pages``, and
the earliest of equal scores is chosen. ``logprobs.npz`` in the folder has float32 [L, V] for each prompt."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import MODEL_REMAPPING, load_model

END = "end"


def spread(name: str, value: mx.array, dtype: mx.Dtype) -> mx.array:
    """Scale weights so that attention is far from uniform; constants become random."""
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    if value.ndim == 1:
        return (value + 0.3 * mx.random.normal(value.shape)).astype(dtype)
    if name.endswith(("mlp.gate.weight", "router.weight")):  # avoids ties between experts
        return (value * 10 + 0.05 * mx.random.normal(value.shape)).astype(dtype)
    return (value * 1.5 + 0.02 * mx.random.normal(value.shape)).astype(dtype)


def make_model(config: dict[str, Any], dtype: mx.Dtype, seed: int) -> Any:
    kind = config["model_type"]
    module: Any = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map_with_path(lambda name, value: spread(name, value, dtype), model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def save(model: Any, config: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))


def log_softmax(logits: mx.array) -> np.ndarray:
    wide = logits.astype(mx.float32)
    return np.array(wide - mx.logsumexp(wide, axis=-1, keepdims=True))


def rounded(cache: Any, pages: mx.Dtype) -> Any:
    """Return caches that round K and V as pages do."""
    if hasattr(cache, "caches"):
        for part in cache.caches:
            rounded(part, pages)
    elif hasattr(cache, "update_and_fetch"):
        store = cache.update_and_fetch
        cache.update_and_fetch = lambda *rows: store(*(row.astype(pages).astype(row.dtype) for row in rows))
    return cache


class EarliestFirst:
    """``mlx.core`` for a model file; its ``argpartition`` puts the earlier of equal scores last."""

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)

    def argpartition(self, scores: mx.array, kth: int, axis: int) -> mx.array:
        if kth >= 0:
            return mx.argpartition(scores, kth=kth, axis=axis)
        order = np.argsort(-np.array(scores.astype(mx.float32)), axis=-1, kind="stable")
        return mx.array(np.flip(order, -1).astype(np.uint32))


def continue_greedily(
    model: Any, prompt: list[int], num_tokens: int, pages: mx.Dtype
) -> tuple[list[int], np.ndarray]:
    """Return greedy tokens, and log probabilities [L, V] at each position."""
    cache = [rounded(one, pages) for one in make_prompt_cache(model)]
    rows = [log_softmax(model(mx.array([prompt]), cache=cache)[0])]
    tokens = [int(rows[0][-1].argmax())]
    while len(tokens) < num_tokens:
        rows.append(log_softmax(model(mx.array([tokens[-1:]]), cache=cache)[0]))
        tokens.append(int(rows[-1][-1].argmax()))
    return tokens, np.concatenate(rows)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    folder = Path(job["folder"])
    model = make_model(job["config"], getattr(mx, job["dtype"]), job["seed"])
    save(model, job["config"], folder)
    model, _ = load_model(folder)
    if (chooses := sys.modules.get("mlx_lm.models.deepseek_v32")) is not None:
        chooses.mx = EarliestFirst()  # type: ignore[attr-defined]
    pages = getattr(mx, job["pages"])
    found = [continue_greedily(model, prompt, job["num_tokens"], pages) for prompt in job["prompts"]]
    np.savez(folder / "logprobs.npz", **{str(i): rows for i, (_, rows) in enumerate(found)})  # type: ignore[arg-type]
    return {"tokens": [tokens for tokens, _ in found]}


def main() -> None:
    assert not any(name.partition(".")[0] == "octavo" for name in sys.modules)
    mx.set_default_device(mx.cpu)
    for line in sys.stdin:
        try:
            answered = answer(json.loads(line))
        except (Exception, SystemExit) as error:  # model code may raise anything
            answered = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
        print(END, json.dumps(answered), flush=True)


if __name__ == "__main__":
    main()
