"""Names full pages by what is in them, and lets others find them."""

from __future__ import annotations

from collections import abc

from .digests import Hasher, extend_chain, pack, split
from .kv_group import Fill, KVGroup, page_ids
from .miss_reasons import MissClassifier
from .page_index import PageIndex
from .state_group import StateGroup
from .types import Digest, PageTable


class Publisher:
    """Publishes what tables fill, and what comes from elsewhere, in all groups.

    hasher        names the contents of pages
    miss_reasons  is told of first pages
    index         keeps tokens of published pages, while it records
    """

    def __init__(
        self,
        groups: abc.Sequence[KVGroup],
        states: StateGroup | None,
        page_size: int,
        hasher: Hasher,
        *,
        miss_reasons: MissClassifier,
        index: PageIndex,
    ) -> None:
        self._groups = groups
        self._states = states
        self._page_size = page_size
        self._hasher = hasher
        self._miss_reasons = miss_reasons
        self._index = index

    def extend(self, digests: list[Digest], tokens: abc.Sequence[int], num_pages: int, salt: bytes) -> None:
        """Make ``digests`` those of the first ``num_pages`` pages, computing what is missing."""
        extend_chain(digests, tokens, num_pages, salt=salt, page_size=self._page_size, hasher=self._hasher)

    def name(self, table: PageTable, tokens: abc.Sequence[int], num_pages: int) -> None:
        """Make the digests of a table's first ``num_pages`` pages known."""
        if len(table.digests) < num_pages:
            self.extend(table.digests, tokens, num_pages, table.salt)

    def publish(self, table: PageTable, tokens: abc.Sequence[int], first: int, last: int) -> None:
        """Let pages ``[first, last)``, which have become full, be found."""
        self.name(table, tokens, last)
        if first == 0:
            self._miss_reasons.first_page(tokens, table.salt)
        parent, digests = table.digests[first - 1] if first else None, table.digests[first:last]
        contents = self._contents(tokens, first, last) if self._index.recording else []
        for group, part in zip(self._groups, table.parts, strict=True):
            wanted = group.spec.publishable_pages(self._page_size, table.quantize_after)
            if (count := min(last, wanted) - first) > 0:
                pages = page_ids(part.pages[first : first + count])
                watched = contents if group.index == 0 else ()
                group.pool.publish(pages, digests[:count], parent, salt=table.salt, contents=watched)
        if contents:  # last: what the index has no room for is what is not cached
            self._index.add(digests, contents, parent, table.salt)

    def insert(
        self,
        tokens: abc.Sequence[int],
        digests: abc.Sequence[Digest],
        first: int,
        fill: Fill,
        *,
        group: int,
        salt: bytes,
    ) -> int | None:
        """``BlockManager.insert``."""
        if self._states is not None and group == self._states.index:
            if any(
                g.pool.prefix_length(digests) < len(digests) for g in self._groups if g.spec.window is None
            ):
                return None
            return self._states.insert(digests, first, fill, salt=salt)
        contents: list[bytes] = []
        known = first  # pages before those, which a window does not show, are part of their names
        if self._index.recording:
            while known and digests[known - 1] not in self._index:
                known -= 1
            contents = self._contents(tokens, known, len(digests))
        watched = contents[first - known :] if group == 0 else []
        new = self._groups[group].insert(digests, first, fill, salt=salt, contents=watched)
        if new is not None and contents:
            self._index.add(digests[known:], contents, digests[known - 1] if known else None, salt)
        if group == 0 and first == 0 and new:
            self._miss_reasons.first_page(tokens, salt)
        return new

    def _contents(self, tokens: abc.Sequence[int], first: int, last: int) -> list[bytes]:
        """Return the packed tokens of pages ``[first, last)``, by page."""
        return split(pack(tokens[first * self._page_size : last * self._page_size]), self._page_size)
