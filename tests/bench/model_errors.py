"""Log probabilities through pages beside mlx-lm's own, for every architecture of the installed mlx-lm.

    python tests/bench/model_errors.py [ARCHITECTURE ...]

Tiny models of random float32 weights, and K and V in 16-bit pages: what differs is the rounding of pages
and of the kernels. The steps are the load-time probe's: chunks and single tokens of several sequences,
beside each other. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from octavo.engine.executor.load import probe
from octavo.engine.executor.load.probe_reference import row_errors
from octavo.kernels.backends import choose_backend
from octavo_lab.architectures import examine

Doubles = NDArray[np.float64]


def log_softmax(logits: Any) -> Doubles:
    """Of rows [..., V]; what a model never draws, -inf, becomes a large negative number."""
    values = np.asarray(logits, np.float64)
    values = np.where(np.isfinite(values), values, -1e4)
    values = values - values.max(-1, keepdims=True)
    result: Doubles = values - np.log(np.exp(values).sum(-1, keepdims=True))
    return result


def float32_weights(value: mx.array) -> mx.array:
    """Random, and nowhere constant: equal scores of experts would be ties."""
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    return (value + 0.05 * mx.random.normal(value.shape)).astype(mx.float32)


def main() -> None:
    differences: list[Doubles] = []
    compare = row_errors

    def recorded(got: Any, wanted: Any) -> Any:
        seen = np.isfinite(np.asarray(wanted))
        differences.append(np.abs(log_softmax(got) - log_softmax(wanted))[seen])
        return compare(got, wanted)

    probe.row_errors = recorded  # type: ignore[attr-defined]
    examine._random = float32_weights
    choice = choose_backend("cpu")
    found: dict[str, dict[str, float]] = {}
    for name in sys.argv[1:] or examine.architectures():
        differences.clear()
        result = examine.examine(name, choice)
        if result.tier != "paged":
            print(f"{name}: {result.tier}, {result.reason}", flush=True)
            continue
        all_of_them = np.concatenate(differences)
        median, largest = float(np.median(all_of_them)), float(all_of_them.max())
        found[name] = {"median": median, "largest": largest}
        print(f"{name}: {result.tier}, median {median:.1e}, largest {largest:.1e}", flush=True)
    print(json.dumps({"backend": choice.reason, "errors": found}))


if __name__ == "__main__":
    main()
