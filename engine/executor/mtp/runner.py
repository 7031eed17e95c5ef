"""Runs the head for multi-token prediction over pages of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..base import RunOutput
from ..batch import Batch
from ..failures import with_failures
from ..paged_model import PagedModel
from ..sampling.logit_rows import Sampler
from ..sampling.sampler import SampleState
from .head import MTPModel


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPRunner:
    """``HeadRunner``. The model's output head selects rows, see ``PagedModel``."""

    head: MTPModel
    paged: PagedModel
    sampling: Sampler
    num_pages: int
    page_size: int
    max_model_len: int

    def run(self, batch: Batch, hidden: npt.NDArray[np.float32], states: Sequence[SampleState]) -> RunOutput:
        """As ``HeadRunner.run``."""
        self.head.body.set_hidden(mx.array(hidden)[:, None])
        self.paged.kv_cache.begin_step(batch.attention)
        if not states:
            self.paged.write(batch.token_ids, batch.attention)
            self.paged.evaluate([])
            return RunOutput((), tuple(self.paged.nonfinite_rows()))
        rows = batch.sample_rows
        logits, further = self.paged.forward_and_hidden(batch.token_ids, batch.attention, rows, rows)
        self.paged.evaluate([logits, further])
        failed = self.paged.nonfinite_rows()
        drawn = list(self.sampling.draw(logits, range(len(states)), states))
        return RunOutput(with_failures(drawn, batch, failed), tuple(failed), hidden=np.array(further))
