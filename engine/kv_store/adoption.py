"""Adoption of fetched pages of a prompt into the pools."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .prefetch import FetchedPage, PrefetchJob
from .transfer import PageTransfer


def adopt(
    transfer: PageTransfer, fetch: PrefetchJob, pages: Sequence[FetchedPage], salt: bytes
) -> tuple[int, bool]:
    """Put a prompt's next pages into the pools as cached pages without a holder. Returns the number of new
    pages, and False if it cannot continue because pages are short or an earlier page is gone."""
    num_new = 0
    for run in _runs(pages):
        group, first = run[0].group, run[0].index
        inserted = transfer.insert(
            fetch.tokens,
            np.stack([page.data for page in run]),
            salt,
            first=first,
            group=group,
            digests=fetch.digests[: first + len(run)],
            media=fetch.media,
        )
        num_new += inserted.num_new
        if inserted.num_skipped:
            return num_new, False
    return num_new, True


def _runs(pages: Sequence[FetchedPage]) -> list[list[FetchedPage]]:
    """Split where the group changes or a page is missing."""
    runs: list[list[FetchedPage]] = []
    for page in pages:
        last = runs[-1][-1] if runs else None
        if last is not None and (last.group, last.index + 1) == (page.group, page.index):
            runs[-1].append(page)
        else:
            runs.append([page])
    return runs
