"""Drawing tokens from logits."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.outputs import TokenLogprob


@dataclass(frozen=True, slots=True)
class Sampled:
    """One drawn token; ``token`` is None when the row failed, and ``error`` says why."""

    token: int | None
    logprob: TokenLogprob | None = None
    error: str | None = None
