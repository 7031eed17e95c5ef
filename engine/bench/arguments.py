"""Argument types that benchmarks share."""

from __future__ import annotations

import argparse

from ..arguments.usage import positive


def counts(text: str) -> tuple[int, ...]:
    """Counts such as "1,8,32", ascending and without repeats, for argparse."""
    try:
        return tuple(sorted({positive(part) for part in text.split(",")}))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be counts such as 1,8,32, got {text!r}") from None
