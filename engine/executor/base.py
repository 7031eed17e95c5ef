"""Interface between the core and a model, for computing one step. Does not import MLX."""

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

    failed_rows  rows with NaN or infinity in K or V; their sequences must end
    hidden       [P, D] inputs of the output head for the rows in ``batch.hidden``; on ranks without the
                 head, the output bits of the layers for all rows
    discarded    indices of samples that must be computed again
    """

    samples: tuple[Sampled, ...]
    failed_rows: tuple[int, ...] = ()
    scores: tuple[TokenLogprob, ...] = ()
    hidden: npt.NDArray[np.float32] | None = None
    discarded: frozenset[int] = frozenset()


class Pending(Protocol):
    """Submitted step. Steps are resolved once, in the order of submission."""

    @property
    def feeds(self) -> bool:
        """Whether the next step may use this step's tokens before ``resolve``."""
        ...

    def resolve(self) -> RunOutput: ...


class Resolved(NamedTuple):
    output: RunOutput
    feeds: bool = False

    def resolve(self) -> RunOutput:
        return self.output


class ModelRunner(Protocol):
    """Loaded model with its page pool. Call it only on the thread that loaded it."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def head(self) -> HeadRunner | None: ...

    @property
    def adapters(self) -> Adapters | None: ...

    @property
    def images(self) -> Images | None: ...

    def submit(self, batch: Batch, states: Sequence[SampleState], after: Pending | None = None) -> Pending:
        """Copy pages, run one forward, and sample one token per entry of ``batch.sample_rows``."""
        ...

    def run(self, batch: Batch, states: Sequence[SampleState]) -> RunOutput: ...

    @property
    def page_layout_key(self) -> PageLayoutKey:
        """Key of the page layout. Runners with equal keys can exchange pages."""
        ...

    def read_pages(self, pages: Sequence[int], group: int) -> PageBytes:
        """Return copies of whole pages of one group. No step may be in flight."""
        ...

    def write_pages(self, pages: Sequence[int], data: PageBytes, group: int) -> None:
        """Write bytes from ``read_pages`` to these pages. No step may be in flight."""
        ...

    def close(self) -> None: ...


class Adapters(Protocol):
    def load(self, name: str, folder: Path, *, replace: bool = False) -> AdapterInfo: ...

    def unload(self, name: str) -> None: ...

    def info(self, name: str) -> AdapterInfo: ...

    def infos(self) -> tuple[AdapterInfo, ...]: ...

    def hold(self, name: str) -> bool: ...

    def release(self, name: str) -> None: ...

    def slot(self, name: str) -> int: ...


class EncodedImage(NamedTuple):
    """An encoded image.

    features   [n, D], embeddings of its tokens
    deepstack  [n, L, D], added after each of the first L layers, if any
    """

    features: npt.NDArray[np.float32]
    deepstack: npt.NDArray[np.float32] | None

    @property
    def nbytes(self) -> int:
        return self.features.nbytes + (0 if self.deepstack is None else self.deepstack.nbytes)


class Images(Protocol):
    @property
    def has_axes(self) -> bool: ...

    def find(self, digest: bytes) -> EncodedImage | None: ...

    def advance(self, image: PromptImage) -> EncodedImage | None: ...


class HeadRunner(Protocol):
    """MTP head of a model, with a page pool. Call it only on the runner's thread."""

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    def run(self, batch: Batch, hidden: npt.NDArray[np.float32], states: Sequence[SampleState]) -> RunOutput:
        """Compute one forward and sample one token per entry of ``batch.sample_rows``.

        ``hidden`` [T, D] is the hidden state of the position before each token.
        """
        ...


KV_NOT_FINITE = "the model computed keys, values or states that are not finite (NaN or infinity)"


def with_failures(samples: Sequence[Sampled], batch: Batch, failed: Sequence[int]) -> tuple[Sampled, ...]:
    if not failed or not samples:
        return tuple(samples)
    starts = batch.attention.q_start[1:]
    first_failed: dict[int, int] = {}
    for row, owner in zip(failed, np.searchsorted(starts, failed, side="right").tolist(), strict=True):
        first_failed[owner] = min(row, first_failed.get(owner, row))
    rows = batch.sample_rows.tolist()
    owners = np.searchsorted(starts, batch.sample_rows, side="right").tolist()
    return tuple(
        Sampled(token=None, error=KV_NOT_FINITE) if first_failed.get(owner, row + 1) <= row else sampled
        for sampled, row, owner in zip(samples, rows, owners, strict=True)
    )


def with_failed_rows(batch: Batch, run: RunOutput) -> RunOutput:
    if not run.failed_rows:
        return run
    return run._replace(samples=with_failures(run.samples, batch, run.failed_rows))


def joined(runs: Sequence[RunOutput]) -> RunOutput:
    hidden: list[npt.NDArray[np.float32]] = [run.hidden for run in runs if run.hidden is not None]
    return RunOutput(
        tuple(itertools.chain.from_iterable(run.samples for run in runs)),
        tuple(itertools.chain.from_iterable(run.failed_rows for run in runs)),
        tuple(itertools.chain.from_iterable(run.scores for run in runs)),
        np.concatenate(hidden) if hidden else None,
    )
