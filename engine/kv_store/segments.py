"""Conversion of saved pages to an engine's own: split at missing pages, and converted to its format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.kernels.page_bytes import PageBytes, convert_pages

from ..api.errors import InvalidRequest
from .page_runs import PageLayoutKey, PageRun


@dataclass(frozen=True, slots=True)
class Segment:
    """Pages ``first``, ``first + 1``, ... of a sequence in one group of layers, or the state after one."""

    group: int
    first: int
    pages: PageBytes


def segments(run: PageRun, kind: PageLayoutKey, start: int) -> Iterator[Segment]:
    """Yield the segments that a run, which begins at position ``start``, has for pools of ``kind``, by group.

    Raises InvalidRequest if it cannot be converted.
    """
    same, old, new = run.kind.matches(kind), run.kind.page_size, kind.page_size
    end = start + len(run.token_ids)
    num_groups = len(run.kind.specs)
    partial = any(len(part.indices) < run.num_pages for part in run.parts[:num_groups])
    if new > old and partial and end % new:
        raise InvalidRequest(
            f"nothing was loaded: the saved pages end after {end} tokens, inside a page of {new}, and "
            f"layers with a sliding window lack earlier positions; start with --page-size {old}"
        )
    for group, part in enumerate(run.parts[:num_groups]):
        for first, stop in _consecutive(part.indices):
            pages = part.pages[first:stop]
            position = start + part.indices[first] * old
            at = -(-position // new)
            if not same:
                pages = _converted(run, kind, group, pages, skip=at * new - position)
            if len(pages):
                yield Segment(group, at, pages)
    if run.kind.states is not None:  # states are taken unchanged, wherever pages end here
        for index, state in zip(run.parts[-1].indices, run.parts[-1].pages, strict=True):
            position = start + (index + 1) * old
            if position % new == 0:
                yield Segment(num_groups, position // new - 1, state[None])


def _consecutive(indices: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield the bounds, in ``indices``, of runs of consecutive numbers."""
    first = 0
    for at in range(1, len(indices) + 1):
        if at == len(indices) or indices[at] != indices[at - 1] + 1:
            yield first, at
            first = at


def _converted(run: PageRun, kind: PageLayoutKey, group: int, pages: PageBytes, *, skip: int) -> PageBytes:
    try:
        return convert_pages(run.kind.specs[group], pages, kind.specs[group], skip=skip)
    except ValueError as error:
        raise InvalidRequest(f"the saved pages cannot be converted: {error}") from None
