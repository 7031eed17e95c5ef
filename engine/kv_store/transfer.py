"""Pages out of the pool and into it, on the engine's thread, and what is known of those that are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.block_manager import BlockManager, Digest, MediaSpan, PageContents, PageId
from octavo.kernels.page_bytes import PageBytes

from ..api.errors import NotConfigured
from .page_runs import PageLayoutKey, PagePart


class PageAccess(Protocol):
    """A model's pools, as bytes: those of groups of pages, and behind them slots of recurrent state.
    Called from the engine's thread, between steps."""

    @property
    def page_layout_key(self) -> PageLayoutKey: ...

    def read_pages(self, pages: Sequence[int], group: int) -> PageBytes: ...

    def write_pages(self, pages: Sequence[int], data: PageBytes, group: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Inserted:
    """Pages that can be found now and could not before, those that could, and those there was no room for."""

    num_new: int
    num_known: int
    num_skipped: int


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The longest cached beginning of a sequence: nothing is held, so it may be evicted at once.

    num_pages   full pages after which a sequence could go on
    needed      per group of layers: which of these pages it would read, rising; behind them, the page
                after which a state
    """

    num_pages: int
    needed: tuple[tuple[int, ...], ...]


class PageTransfer:
    """Reads and inserts pages of a core's pool.

    remember   keep the tokens of published pages, so that ``list_pages`` can tell them all
    """

    def __init__(self, access: PageAccess, blocks: BlockManager, *, remember: bool = False) -> None:
        self._access = access
        self._blocks = blocks
        if remember:
            blocks.keep_tokens()

    @property
    def page_size(self) -> int:
        return self._blocks.page_size

    @property
    def kind(self) -> PageLayoutKey:
        """NotConfigured without a prefix cache."""
        self._check()
        return self._access.page_layout_key

    def _check(self) -> None:
        """NotConfigured without a prefix cache."""
        if not self._blocks.prefix_cache:
            raise NotConfigured("the prefix cache is off, so no page is found; leave --no-prefix-cache out")

    def find_prefix(self, digests: Sequence[Digest]) -> CachedPrefix:
        """How much is cached of a sequence with these pages."""
        self._check()
        blocks = self._blocks
        count, groups = blocks.num_findable(digests), range(len(blocks.parts))
        needed = (tuple(sorted(blocks.needed_pages(count, group=group))) for group in groups)
        return CachedPrefix(count, tuple(needed))

    def read(
        self, digests: Sequence[Digest], wanted: Sequence[Sequence[int]] | None = None
    ) -> tuple[PagePart, ...]:
        """Copies of what can be found now, per group of layers, states behind them; ``wanted`` says which
        of ``digests`` in each (None: all). What is gone is left out."""
        parts = []
        for group in range(len(self._blocks.parts)):
            indices = range(len(digests)) if wanted is None else wanted[group]
            found = {index: self._blocks.find(digests[index], group) for index in indices}
            pages = {index: page for index, page in found.items() if page is not None}
            parts.append(PagePart(tuple(pages), self._access.read_pages(list(pages.values()), group)))
        return tuple(parts)

    def insert(
        self,
        tokens: Sequence[int],
        pages: PageBytes,
        salt: bytes,
        *,
        first: int,
        group: int = 0,
        digests: list[Digest] | None = None,
        media: tuple[MediaSpan, ...] = (),
    ) -> Inserted:
        """Put pages ``first``, ``first + 1``, ... of a sequence, of this pool's kind, where they are cached
        and held by nobody. All or none: they need room and, in a group without a window, the pages
        before them.

        digests   of the sequence's pages up to the last of these, if they are known
        """
        blocks, count = self._blocks, len(pages)
        end = first + count
        tokens = tokens[: end * blocks.page_size]
        named = blocks.name_pages([*tokens, 0], [] if digests is None else digests, salt=salt, media=media)

        def fill(indices: list[int], targets: list[PageId]) -> None:
            self._access.write_pages(targets, pages[[index - first for index in indices]], group)

        new = blocks.insert(tokens, named, first, fill, group=group, salt=salt, media=media)
        if new is None:
            return Inserted(0, 0, count)
        return Inserted(new, count - new, 0)

    def list_pages(self) -> dict[Digest, PageContents]:
        """What is remembered of pages that some group has, and of those before them, which name them."""
        return self._blocks.page_index.worth_keeping()
