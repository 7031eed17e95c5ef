"""Drawing tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.engine.outputs import TokenLogprob
from octavo.engine.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Sampled:
    """One drawn token; ``token`` is None when the row failed, and ``error`` says why."""

    token: int | None
    logprob: TokenLogprob | None = None
    error: str | None = None


class SampleState:
    """What one sample remembers between its tokens: its parameters, seed and token counts.

    ``seed`` is the sample's own (for n > 1 the caller gives each sample another one, as in
    ``seed + index``). The draw of the k-th token depends on (seed, k) and the logits alone,
    neither on batch neighbours nor on preemption.
    """

    def __init__(
        self, params: SamplingParams, *, seed: int, prompt_ids: Sequence[int], vocab_size: int
    ) -> None:
        self.params = params
        self.seed = seed
        self.vocab_size = vocab_size
        self.num_generated = 0

    def record(self, token: int) -> None:
        """The sample's next token is ``token``."""
        self.num_generated += 1
