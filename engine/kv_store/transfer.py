from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.block_manager import BlockManager, Digest, MediaSpan, PageContents, PageId
from octavo.kernels.page_bytes import PageBytes

from ..api.errors import NotConfigured
from .page_runs import PageLayoutKey, PagePart


class PageAccess(Protocol):
    """A model's pools as bytes. Called only on the engine's thread, between steps."""

    @property
    def page_layout_key(self) -> PageLayoutKey: ...

    def read_pages(self, pages: Sequence[int], group: int) -> PageBytes: ...

    def write_pages(self, pages: Sequence[int], data: PageBytes, group: int) -> None: ...


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Longest cached prefix of a sequence. Its pages may be evicted."""

    num_pages: int
    needed: tuple[tuple[int, ...], ...]


class PageTransfer:
    def __init__(self, access: PageAccess, blocks: BlockManager, *, remember: bool = False) -> None:
        self._access = access
        self._blocks = blocks
        if remember:
            blocks.keep_tokens()

    @property
    def kind(self) -> PageLayoutKey:
        """Layout of this pool's pages. Raises NotConfigured without a prefix cache."""
        self._check()
        return self._access.page_layout_key

    def _check(self) -> None:
        if not self._blocks.prefix_cache:
            raise NotConfigured(
                "the prefix cache is off, so no page can be saved; leave --no-prefix-cache out"
            )

    def find_prefix(self, digests: Sequence[Digest]) -> CachedPrefix:
        self._check()
        blocks = self._blocks
        count, groups = blocks.num_findable(digests), range(len(blocks.parts))
        needed = (tuple(sorted(blocks.needed_pages(count, group=group))) for group in groups)
        return CachedPrefix(count, tuple(needed))

    def read(
        self, digests: Sequence[Digest], wanted: Sequence[Sequence[int]] | None = None
    ) -> tuple[PagePart, ...]:
        """Return copies of cached pages: one ``PagePart`` per group, then a part for states.

        ``wanted`` has indices into ``digests`` for each part; None: all pages.
        """
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
    ) -> int | None:
        """Insert pages ``first``, ``first + 1``, ... of a sequence into the cache.

        Return the number of pages that were not cached yet; None, without an insertion, if they do not fit.
        """
        blocks = self._blocks
        tokens = tokens[: (first + len(pages)) * blocks.page_size]
        named = blocks.page_digests([*tokens, 0], [] if digests is None else digests, salt=salt, media=media)

        def fill(indices: list[int], targets: list[PageId]) -> None:
            self._access.write_pages(targets, pages[[index - first for index in indices]], group)

        return blocks.insert(tokens, named, first, fill, group=group, salt=salt, media=media)

    def list_pages(self) -> dict[Digest, PageContents]:
        return self._blocks.page_index.cached_pages()
