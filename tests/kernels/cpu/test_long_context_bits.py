"""Bits of attention over long contexts, which are divided into several parts.

With few rows, parts are separate work items; with many rows, one item has all parts."""

from __future__ import annotations

import pytest

from native import at_every_level, require_extension, run_at_level

require_extension()

from long_contexts import differences  # noqa: E402

pytestmark = pytest.mark.parity

CASES = [
    ("bf16", 1, ""),
    ("fp4", 4, ""),
    ("int8", 2, "window"),
    ("fp4", 2, "residual"),
    ("nvfp4", 2, "residual window"),
    ("fp5", 2, "sinks"),
    ("bf16", 16, "latents"),
    ("fp4", 16, "latents residual"),
]


@pytest.mark.parametrize(("name", "group", "kind"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_no_bit_depends_on_the_chunk(name: str, group: int, kind: str) -> None:
    assert differences(name, group, kind) == []


@at_every_level
def test_no_bit_depends_on_the_chunk_at_any_level(level: str) -> None:
    code = "from long_contexts import differences; print(differences('fp4', 4, 'sinks'))"
    assert run_at_level(level, code).strip() == "[]"
