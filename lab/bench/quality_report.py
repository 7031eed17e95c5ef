from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..plots.figure import picture


def render(result: Mapping[str, Any]) -> str:
    rows = result["formats"]
    lengths = list(next(iter(rows.values())).get("recall", {}))
    head = f"{'format':<14}{'bytes':>7}{'perplexity':>17}{'top-1':>9}{'KL':>10}{'K, 30x':>8}{'decode/s':>10}"
    lines = [
        f"{result['model']}: {result['documents']} documents of {result['text']}, {result['tokens']} tokens; "
        f"perplexity is a ratio to that of {result['baseline']} pages, with its standard error",
        "",
        head + "".join(f"{'exact at ' + length:>20}" for length in lengths),
    ]
    for name, row in rows.items():
        line = (
            f"{name:<14}{row['bytes_per_token']:>7.0f}{_ratio(row):>17}"
            f"{row['top1_agreement']:>9.2%}{row['kl']:>10.6f}{row['k_row_error']['outliers_30x']:>8.3f}"
            f"{row['decode_tokens_per_s']:>10.0f}"
        )
        for length in lengths:
            recall = row["recall"][length]
            line += f"{recall['exact']:>10.2%} (-{recall['lost']} +{recall['gained']})".rjust(20)
        lines.append(line)
    lines += ["", f"perplexity with {result['baseline']} pages: {_baseline(result)['perplexity']:.4f}"]
    if lengths:
        counts = ", ".join(f"{_baseline(result)['recall'][n]['questions']} at {n}" for n in lengths)
        lines.append(f"exact: answers to the letter of {counts} tokens; (-lost +gained) against the baseline")
    else:
        lines.append(f"recall {result['recall']}")
    lines.append(
        "KL over the likeliest 20 tokens and the rest as one; K, 30x: relative RMS error of K rows of"
    )
    lines.append("128 values with 4 outlier channels")
    lines += [f"not for this model: {reason}" for reason in result["refused"].values()]
    return "\n".join(lines)


def _ratio(row: Mapping[str, Any]) -> str:
    error = row["ratio_se"]
    return f"{row['ratio']:.4f}" + ("" if error is None else f" +-{error:.4f}")


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw divergence against bytes per token and, if measured, recall against context length."""
    rows = result["formats"]
    recall = "recall" in _baseline(result)
    with picture(path, columns=2 if recall else 1) as (left, *right):
        for name, row in rows.items():
            if name != result["baseline"]:
                left.scatter(row["bytes_per_token"], row["kl"])
                left.annotate(name, (row["bytes_per_token"], row["kl"]), fontsize=8)
        left.set(xlabel="bytes per token", ylabel=f"KL to {result['baseline']} pages, nats", yscale="log")
        for axis in right:
            for name, row in rows.items():
                lengths = [int(length) for length in row["recall"]]
                exact = [100 * each["exact"] for each in row["recall"].values()]
                axis.plot(lengths, exact, marker="o", label=name)
            axis.set(xlabel="document, tokens", ylabel="answers exact, %")
            axis.legend(fontsize=8)


def _baseline(result: Mapping[str, Any]) -> Mapping[str, Any]:
    row: Mapping[str, Any] = result["formats"][result["baseline"]]
    return row
