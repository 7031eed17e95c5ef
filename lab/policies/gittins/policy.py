from __future__ import annotations

from collections import OrderedDict, abc
from heapq import heapify, heappop, heappush

from octavo.block_manager.hit_statistics import AGES, GAPS, NUM_AGES, AgeHistogram, HitStatistics, kind_of
from octavo.block_manager.policies.base import register
from octavo.block_manager.types import Digest, PageId

from .shadow_lru import ShadowLRU

ENDS = kind_of(uses=0, num_new=0, gap=0)
UNKNOWN = -1  # number of uses of an unknown page
MIN_GHOSTS = 32_768
RERANK_FIRST, RERANK_LAST = 16, 512


class _Batch:
    __slots__ = (
        "age", "behind", "num_awaited", "num_live", "pages", "released_at", "seen", "serial", "uses",
        "value", "weight",
    )  # fmt: skip

    def __init__(
        self, pages: list[PageId], seen: AgeHistogram, *, uses: int, released_at: int, behind: _Batch | None
    ) -> None:
        self.pages = pages
        self.seen = seen
        self.uses = uses
        self.released_at = released_at
        self.behind = behind
        self.age = 0
        self.num_live = self.num_awaited = len(pages)
        self.weight = 1 / len(pages)
        self.value = 0.0
        self.serial = 0


class Gittins:
    """Evicts the page with the fewest expected hits for its space.

    A page's value is its Gittins index: the highest hit rate that caching it for a while can give (J.
    Gittins, "Bandit processes and dynamic allocation indices", J. R. Statist. Soc. B 41, 1979; compare LHD of
    Beckmann, Chen and Cidon, NSDI 2018). Evicted pages are remembered for a while, so that misses are
    counted, too. While LRU would have more hits (``ShadowLRU``), the policy evicts like LRU. All
    operations take O(1) per page.
    """

    def __init__(self, num_pages: int, num_ghosts: int) -> None:
        self._num_ghosts = num_ghosts
        self._ghosts: OrderedDict[Digest, _Batch] = OrderedDict()
        self._batch_of: list[_Batch | None] = [None] * num_pages
        self._uses = [UNKNOWN] * num_pages
        self._gaps = [0] * num_pages
        self._num_listed = 0
        self._digests: abc.Sequence[Digest | None] = ()
        self._now = 0
        self._due: dict[int, list[_Batch]] = {}
        self._heap: list[tuple[float, int, int, _Batch]] = []
        self._serial = 0
        self._statistics = HitStatistics()
        self._shadow = ShadowLRU(num_pages)
        self._rerank_at = RERANK_FIRST

    def __len__(self) -> int:
        return self._num_listed

    def __iter__(self) -> abc.Iterator[PageId]:
        return (PageId(page) for page, batch in enumerate(self._batch_of) if batch is not None)

    def release(self, pages: abc.Sequence[PageId], digests: abc.Sequence[Digest | None]) -> None:
        self._digests = digests
        self._now += 1
        self._num_listed += len(pages)
        self._advance_age(self._due.pop(self._now, ()))
        if self._now >= self._rerank_at:
            self._rerank()
        all_uses, gaps = self._uses, self._gaps
        by_uses: dict[int, list[PageId]] = {}
        run: list[PageId] = []
        last, gap = UNKNOWN, 0
        for page in reversed(pages):
            uses = all_uses[page]
            if uses == UNKNOWN:
                uses = self._recall(page, digests[page])
            if uses != last:
                run, last = by_uses.setdefault(uses, []), uses
            run.append(page)
            if uses:
                gap = gaps[page]
        self._list(by_uses, gap)
        if self._shadow.release(len(pages)):
            self._rerank()

    def _list(self, by_uses: dict[int, list[PageId]], gap: int) -> None:
        num_new = len(by_uses.get(0, ()))
        kinds = {uses: kind_of(uses=uses, num_new=num_new, gap=gap) for uses in by_uses}
        behind: _Batch | None = None
        for uses, pages in reversed(by_uses.items()):
            body = pages if uses else pages[:-1]
            if not uses:
                behind = self._add(pages[-1:], ENDS, 0, behind)
            if body:
                behind = self._add(body, kinds[uses], uses, behind)

    def _add(self, pages: list[PageId], kind: int, uses: int, behind: _Batch | None) -> _Batch:
        seen, batch_of = self._statistics.seen(kind), self._batch_of
        batch = _Batch(pages, seen, uses=uses, released_at=self._now, behind=behind)
        seen.reached[0] += 1
        for page in pages:
            batch_of[page] = batch
        self._due.setdefault(self._now + AGES[1], []).append(batch)
        self._value(batch)
        heappush(self._heap, (batch.value, self._now, batch.serial, batch))
        return batch

    def reuse(self, pages: abc.Sequence[PageId]) -> None:
        all_uses, gaps, batch_of = self._uses, self._gaps, self._batch_of
        want = self._shadow.want
        last, gap = None, GAPS[0]
        for page in pages:
            uses = all_uses[page]
            all_uses[page] = uses + 1 if uses != UNKNOWN else 1
            batch = batch_of[page]
            if batch is None:
                gaps[page] = gaps[page] or GAPS[0]
                continue
            if batch is not last:
                last, gap, used = batch, GAPS[batch.age], batch.seen.used
            used[batch.age] += batch.weight
            want(batch.released_at, found=True)
            batch.num_awaited -= 1
            batch.num_live -= 1
            batch_of[page] = None
            self._num_listed -= 1
            gaps[page] = (gaps[page] + gap + 1) // 2 if gaps[page] else gap

    def evict(self, num_pages: int) -> list[PageId]:
        evicted: list[PageId] = []
        heap = self._heap
        while len(evicted) < num_pages:
            _, _, serial, batch = heap[0]
            if batch.num_live and batch.serial == serial:
                evicted += self._shrink(batch, num_pages - len(evicted))
            else:
                heappop(heap)
        self._num_listed -= num_pages
        if not self._num_listed:
            self._shadow.clear()
        ghosts = self._ghosts
        for _ in range(len(ghosts) - self._num_ghosts):
            ghosts.popitem(last=False)[1].num_awaited -= 1
        return evicted

    def _shrink(self, batch: _Batch, num_pages: int) -> list[PageId]:
        batch_of, all_uses, gaps, digests = self._batch_of, self._uses, self._gaps, self._digests
        if batch.num_live != len(batch.pages):
            batch.pages = [page for page in batch.pages if batch_of[page] is batch]
        split = max(batch.num_live - num_pages, 0)
        pages = batch.pages[split:]
        del batch.pages[split:]
        batch.num_live = split
        pages.reverse()
        for page in pages:
            digest = digests[page]
            assert digest is not None, f"page {page} is listed and cannot be found"
            self._ghosts[digest] = batch
            batch_of[page] = None
            all_uses[page] = UNKNOWN
            gaps[page] = 0
        return pages

    def _recall(self, page: PageId, digest: Digest | None) -> int:
        assert digest is not None, "released without a digest"
        batch = self._ghosts.pop(digest, None)
        uses = 0
        if batch is not None:
            batch.seen.used[batch.age] += batch.weight
            self._shadow.want(batch.released_at, found=False)
            batch.num_awaited -= 1
            self._gaps[page] = GAPS[batch.age]
            uses = batch.uses + 1
        self._uses[page] = uses
        return uses

    def _advance_age(self, batches: abc.Iterable[_Batch]) -> None:
        due, heap = self._due, self._heap
        for batch in batches:
            if not batch.num_awaited:
                continue
            batch.age = age = batch.age + 1
            batch.seen.reached[age] += batch.num_awaited * batch.weight
            if age + 1 < NUM_AGES:
                due.setdefault(batch.released_at + AGES[age + 1], []).append(batch)
            if batch.num_live:
                self._value(batch)
                heappush(heap, (batch.value, batch.released_at, batch.serial, batch))

    def _value(self, batch: _Batch) -> None:
        self._serial += 1
        batch.serial = self._serial
        value = 0.0 if self._shadow.follow_lru else self._statistics.indices(batch.seen.kind)[batch.age]
        behind = batch.behind
        if behind is not None:
            if not behind.num_live:
                batch.behind = None
            elif behind.value > value:
                value = behind.value
        batch.value = value

    def _rerank(self) -> None:
        self._rerank_at = self._now + min(max(self._now // 8, RERANK_FIRST), RERANK_LAST)
        self._statistics.refresh(self._now)
        live = [
            (serial, batch) for _, _, serial, batch in self._heap if batch.serial == serial and batch.num_live
        ]
        live.sort()
        for _, batch in live:
            self._value(batch)
        self._heap = [(batch.value, batch.released_at, batch.serial, batch) for _, batch in live]
        heapify(self._heap)


@register("gittins")
def make_gittins(num_pages: int) -> Gittins:
    return Gittins(num_pages, max(MIN_GHOSTS, 2 * num_pages))
