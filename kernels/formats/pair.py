"""Pairs of page formats for K and V, written as one name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FormatPair:
    """Names of the page formats of K and V, as in ``page_format``."""

    k: str
    v: str

    def __str__(self) -> str:
        """Return one name if both are equal, such as fp4, else both, such as int8/fp4."""
        return self.k if self.k == self.v else f"{self.k}/{self.v}"


RECIPE = "fp5/fp4"
"""The fewest bits measured to answer as 16-bit pages do, with the two residual pages that are the default
(docs/benchmarks/results)."""


def format_pair(name: str) -> FormatPair:
    """Return the formats of ``name``, which is one format for both or "K/V"."""
    k, _, v = name.partition("/")
    return FormatPair(k, v or k)
