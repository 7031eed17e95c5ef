from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from octavo.block_manager import Digest, MediaSpan, PageContents
from octavo.block_manager.digests import media_in, page_contents, sha256_chain, tokens_in
from octavo.kernels.interface import PoolSpec
from octavo.kernels.page_bytes import PageBytes, convert_pages

from ..api.errors import InvalidRequest

VERSION = "pages 3"
"""Version of the metadata in page files."""

MEDIA_VERSION = "pages 4"
"""Version of the metadata in page files with images."""


@dataclass(frozen=True, slots=True)
class StateKind:
    """Layout of recurrent states. ``page_size`` is the number of positions between snapshots."""

    page_size: int
    entries: tuple[tuple[str, tuple[int, ...], str], ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class PageLayoutKey:
    """Layout of pages and of recurrent states. Pages are exchanged unchanged only between equal layouts."""

    model: str
    specs: tuple[PoolSpec, ...]
    context: str = ""
    states: tuple[StateKind, ...] = ()

    @property
    def page_size(self) -> int:
        return self.specs[0].page_size if self.specs else self.states[0].page_size

    @property
    def part_bytes(self) -> tuple[int, ...]:
        return (*(spec.page_bytes for spec in self.specs), *(states.nbytes for states in self.states))

    def group(self, index: int) -> PageLayoutKey:
        if len(self.part_bytes) == 1:
            return self
        if index == len(self.specs):
            return PageLayoutKey(self.model, (), context=self.key, states=self.states)
        return PageLayoutKey(self.model, (self.specs[index],), context=self.key)

    def matches(self, other: PageLayoutKey) -> bool:
        same = (self.model, self.context) == (other.model, other.context)
        return same and _unsized(self) == _unsized(other) and self.states == other.states

    def describe(self) -> str:
        spec = self.specs[0]
        name = spec.k_format if spec.k_format == spec.v_format else f"{spec.k_format}/{spec.v_format}"
        return f"{name} pages of {spec.page_size} tokens"

    def metadata(self) -> dict[str, str]:
        layers = [
            [
                [y.num_kv_heads, y.head_dim, y.value_dim, y.window, y.keep, *([True] if y.chunked else ())]
                for y in spec.layers
            ]
            for spec in self.specs
        ]
        states = {"states": json.dumps(self.states[0].entries)} if self.states else {}
        return states | {
            "octavo": VERSION,
            "model": self.model,
            "context": self.context,
            "page_size": str(self.page_size),
            "formats": json.dumps([[spec.k_format, spec.v_format] for spec in self.specs]),
            "layers": json.dumps(layers),
        }

    @property
    def key(self) -> str:
        """Return 32 hexadecimal digits for folder names."""
        return hashlib.sha256(json.dumps(self.metadata(), sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class PagePart:
    """Pages of one group of layers.

    indices   ascending indices of these pages in the run
    pages     [len(indices), page_bytes]
    """

    indices: tuple[int, ...]
    pages: PageBytes


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive full pages of one sequence.

    parent      digest of the page before the first page
    parts       a ``PagePart`` per group of layers, then a part for recurrent states
    media       images of the pages; their starts are relative to the first page
    """

    kind: PageLayoutKey
    parent: Digest
    token_ids: tuple[int, ...]
    parts: tuple[PagePart, ...]
    salt: bytes | None = None
    media: tuple[MediaSpan, ...] = ()

    @property
    def num_pages(self) -> int:
        return len(self.token_ids) // self.kind.page_size

    def digests(self) -> list[Digest]:
        size, digests = self.kind.page_size, [self.parent]
        for contents in page_contents(self.token_ids, 0, self.num_pages, page_size=size, media=self.media):
            digests += sha256_chain(digests[-1], contents, len(contents))
        return digests[1:]


def _unsized(kind: PageLayoutKey) -> list[PoolSpec]:
    return [replace(spec, num_pages=1) for spec in kind.specs]


@dataclass(frozen=True, slots=True)
class Chain:
    digests: tuple[Digest, ...]
    parent: Digest | None
    tokens: tuple[int, ...]
    salt: bytes
    media: tuple[MediaSpan, ...] = ()


def chains(entries: Mapping[Digest, PageContents], max_pages: int, *, page_size: int) -> list[Chain]:
    """Return the pages in chains of at most ``max_pages``."""
    children: dict[Digest | None, list[Digest]] = {}
    for digest, entry in entries.items():
        children.setdefault(entry.parent, []).append(digest)
    found: list[Chain] = []
    todo = list(children.get(None, ()))
    while todo:
        digests = [todo.pop()]
        following = children.get(digests[-1], [])
        while len(following) == 1 and len(digests) < max_pages:
            digests += following
            following = children.get(digests[-1], [])
        first, contents = entries[digests[0]], [entries[digest].tokens for digest in digests]
        tokens = tuple(token for page in contents for token in tokens_in(page, page_size))
        media = {
            span.start + index * page_size: span._replace(start=span.start + index * page_size)
            for index, page in enumerate(contents)
            for span in media_in(page, page_size)
        }
        found.append(Chain(tuple(digests), first.parent, tokens, first.salt, tuple(media.values())))
        todo += following
    return found


@dataclass(frozen=True, slots=True)
class Segment:
    group: int
    first: int
    pages: PageBytes


def segments(run: PageRun, kind: PageLayoutKey, start: int) -> Iterator[Segment]:
    """Yield the pages of a run, converted to layout ``kind``. Raises InvalidRequest."""
    same, old, new = run.kind.matches(kind), run.kind.page_size, kind.page_size
    end = start + len(run.token_ids)
    num_groups = len(run.kind.specs)
    partial = any(len(part.indices) < run.num_pages for part in run.parts[:num_groups])
    if new > old and partial and end % new:
        raise InvalidRequest(
            f"nothing was loaded: the saved pages end after {end} tokens, inside a page of {new} tokens, and "
            f"layers with a sliding window lack earlier positions; start the server with --page-size {old}"
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
    if run.kind.states:
        for index, state in zip(run.parts[-1].indices, run.parts[-1].pages, strict=True):
            position = start + (index + 1) * old
            if position % new == 0:
                yield Segment(num_groups, position // new - 1, state[None])


def _consecutive(indices: tuple[int, ...]) -> Iterator[tuple[int, int]]:
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
