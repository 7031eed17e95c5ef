"""The interface between the core and a model, for computing one step.

The protocol and its results import no MLX, so that the core and its tests run without a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from octavo.kernels.page_bytes import PageBytes

from ..api.engine_info import AdapterInfo, EngineInfo
from ..api.image import PromptImage
from ..api.outputs import TokenLogprob
from ..kv_store.page_runs import PageLayoutKey
from .batch import Batch
from .sampling.sampler import Sampled, SampleState


class RunOutput(NamedTuple):
    """Results of one step.

    samples      one per entry of ``batch.sample_rows``, in that order; a sample whose row, or
                 one before it of the same sequence, failed has ``token=None`` and says why
    failed_rows  rows t of the step whose K or V was not finite: whoever owns such a row must
                 end, whether it sampled or not, and nothing it wrote may be published
    hidden       [P, D], what the output head gets of each row of ``batch.hidden``; None: nobody asked
    scores       one per row of ``batch.scored``, in that order; those of failed rows mean nothing
    void         indices of samples whose row was computed of another token than the step before gave in the
                 end: they mean nothing, and the row is to be computed again
    """

    samples: tuple[Sampled, ...]
    failed_rows: tuple[int, ...] = ()
    scores: tuple[TokenLogprob, ...] = ()
    hidden: npt.NDArray[np.float32] | None = None
    void: frozenset[int] = frozenset()


class Pending(Protocol):
    """A submitted step. Steps are resolved once, in the order of submission."""

    @property
    def feeds(self) -> bool:
        """Whether the next step may take its tokens from here before this one is resolved."""
        ...

    def resolve(self) -> RunOutput:
        """Wait for the step; return its results."""
        ...


class Resolved(NamedTuple):
    """A ``Pending`` of a step that was computed on submission."""

    output: RunOutput
    feeds: bool = False

    def resolve(self) -> RunOutput:
        return self.output


class ModelRunner(Protocol):
    """A loaded model with its page pool. Every call comes from the thread that loaded it."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def head(self) -> HeadRunner | None:
        """The model's MTP head; None unless ``speculate`` requested it."""
        ...

    @property
    def adapters(self) -> Adapters | None:
        """The adapters of rows; None if the engine was started without any."""
        ...

    @property
    def images(self) -> Images | None:
        """The images that prompts can have; None where prompts are text."""
        ...

    def submit(self, batch: Batch, states: Sequence[SampleState], after: Pending | None = None) -> Pending:
        """Copy pages, run one forward, draw one token per entry of ``batch.sample_rows``: at once, or
        while the caller does something else.

        ``states[i]`` belongs to ``batch.sample_rows[i]``, and says what its draw needs before this
        returns. The drawn tokens are not recorded: the caller calls ``states[i].record(token)`` once it
        has accepted one. ``after`` is the step before, if it is not resolved: it ``feeds``, and gives
        the tokens that ``batch.sources`` names.
        """
        ...

    def run(self, batch: Batch, states: Sequence[SampleState]) -> RunOutput:
        """Submit and resolve a step."""
        ...

    @property
    def page_layout_key(self) -> PageLayoutKey:
        """Key of its page layout: pages with an equal key can be put into its pools."""
        ...

    def read_pages(self, pages: Sequence[int], group: int) -> PageBytes:
        """Bytes of whole pages of one group, a copy: see ``PageStorage.read_pages``. No step is in flight."""
        ...

    def write_pages(self, pages: Sequence[int], data: PageBytes, group: int) -> None:
        """Put bytes as from ``read_pages`` into these pages of a group. No step is in flight."""
        ...

    def close(self) -> None:
        """Free the weights and the pool."""
        ...


class Adapters(Protocol):
    """The adapters of a loaded model; see ``AdapterSlots``."""

    def load(self, name: str, folder: Path, *, replace: bool = False) -> AdapterInfo: ...

    def unload(self, name: str) -> None: ...

    def info(self, name: str) -> AdapterInfo: ...

    def infos(self) -> tuple[AdapterInfo, ...]: ...

    def hold(self, name: str) -> bool: ...

    def release(self, name: str) -> None: ...

    def slot(self, name: str) -> int: ...


class EncodedImage(Protocol):
    """The rows of an image; see ``executor.vision.tower.Encoded``."""

    @property
    def features(self) -> npt.NDArray[np.float32]: ...

    @property
    def deepstack(self) -> npt.NDArray[np.float32] | None: ...


class Images(Protocol):
    """The vision part of a loaded model; see ``ImageEncoder``."""

    @property
    def has_axes(self) -> bool: ...

    def encode(self, image: PromptImage) -> EncodedImage: ...


class HeadRunner(Protocol):
    """A model's own head for multi-token prediction, with a page pool. Calls come from the runner's thread.

    num_pages      of ``page_size`` positions
    max_model_len  positions of a sequence, at most
    """

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    def run(self, batch: Batch, hidden: npt.NDArray[np.float32], states: Sequence[SampleState]) -> RunOutput:
        """Compute one forward: row t has the hidden state ``hidden[t]`` of a position, and the token after
        it. A draw per entry of ``batch.sample_rows``, and in ``RunOutput.hidden`` what stands for the hidden
        state of the position after each."""
        ...


KV_NOT_FINITE = "the model computed keys, values or states that are not finite (NaN or infinity)"


def with_failures(samples: Sequence[Sampled], batch: Batch, failed: Sequence[int]) -> tuple[Sampled, ...]:
    """Samples whose row is a failed one, or comes after one of its sequence, become failures themselves."""
    if not failed:
        return tuple(samples)
    starts = batch.attention.q_start[1:]
    first_failed: dict[int, int] = {}  # by the sequence that owns it
    for row, owner in zip(failed, np.searchsorted(starts, failed, side="right").tolist(), strict=True):
        first_failed[owner] = min(row, first_failed.get(owner, row))
    rows = batch.sample_rows.tolist()
    owners = np.searchsorted(starts, batch.sample_rows, side="right").tolist()
    return tuple(
        Sampled(token=None, error=KV_NOT_FINITE) if first_failed.get(owner, row + 1) <= row else drawn
        for drawn, row, owner in zip(samples, rows, owners, strict=True)
    )


def with_failed_rows(batch: Batch, run: RunOutput) -> RunOutput:
    """Return the output of a whole batch, in which samples of failed rows are failures."""
    if not run.failed_rows:
        return run
    return run._replace(samples=with_failures(run.samples, batch, run.failed_rows))


def joined(runs: Sequence[RunOutput]) -> RunOutput:
    """Return the combined output of slices that were computed one after the other."""
    hidden: list[npt.NDArray[np.float32]] = [run.hidden for run in runs if run.hidden is not None]
    return RunOutput(
        tuple(itertools.chain.from_iterable(run.samples for run in runs)),
        tuple(itertools.chain.from_iterable(run.failed_rows for run in runs)),
        tuple(itertools.chain.from_iterable(run.scores for run in runs)),
        np.concatenate(hidden) if hidden else None,
    )
