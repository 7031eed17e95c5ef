"""Runner of the MTP head, over its own pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..base import RunOutput, with_failures
from ..batch import Batch, Wanted
from ..paged_model import PagedModel
from ..sampling.logit_rows import Sampler
from ..sampling.sampler import SampleState
from .head import HIDDEN, MTPModel


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPRunner:
    """``HeadRunner`` of an MTP head; the model's output head selects the rows, see ``PagedModel``."""

    head: MTPModel
    paged: PagedModel
    sampling: Sampler
    num_pages: int
    page_size: int
    max_model_len: int

    def run(self, batch: Batch, hidden: npt.NDArray[np.float32], states: Sequence[SampleState]) -> RunOutput:
        """See ``HeadRunner.run``."""
        batch = batch._replace(inputs={HIDDEN: hidden})
        rows = batch.sample_rows
        outputs = self.paged.forward(batch, Wanted(rows, hidden=rows))
        self.paged.evaluate(outputs.arrays)
        failed = self.paged.nonfinite_rows()
        if outputs.logits is None or outputs.hidden is None:
            return RunOutput((), tuple(failed))
        drawn = list(self.sampling.draw(outputs.logits, range(len(states)), states))
        return RunOutput(with_failures(drawn, batch, failed), tuple(failed), hidden=np.array(outputs.hidden))
