"""An eviction policy that learns how soon which pages are used again."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Run
from itertools import pairwise
from operator import itemgetter

from octavo.block_manager.types import Digest, PageId

UNKNOWN, TAIL, NEW = -1, 0, 1  # classes: the end of a new sequence, another new page, then by uses
NUM_CLASSES = 12  # ... up to 10 uses and more
NUM_AGES = 14
YOUNG = 4  # releases; the first age ends there, and each lasts twice as long as the one before
AGES = (0.0, *(float(YOUNG * 2**age) for age in range(NUM_AGES - 1)))  # where each begins
WIDTHS = (*(end - begin for begin, end in pairwise(AGES)), AGES[-1])
PRIOR = 1.0  # a class that was released so often counts as much as all classes together
DOUBT = 16.0  # releases without a return that are added to what was seen at each age
HALF_LIFE = 8192  # releases after which what was learned counts half
RERANK_FIRST, RERANK_LAST = 16, 256  # releases between two rankings: at first, and in the long run


class _Batch:
    """Pages of one class that were released together; the next to go at the end.

    A page that has been used again stays in ``pages`` until it is met or swept: what counts is
    which batch the policy has for a page.
    """

    __slots__ = ("age", "kind", "num_live", "pages", "released_at", "weight")

    def __init__(self, kind: int, released_at: int) -> None:
        self.kind = kind
        self.released_at = released_at
        self.age = 0
        self.pages: list[PageId] = []
        self.num_live = 0
        self.weight = 1.0  # of one page: a sequence counts once in what is learned, however long


class Gittins:
    """Gives up the page that promises the fewest hits for the room it takes.

    Pages are classed by how often they were found, and the last page of a sequence apart. Per class
    the policy learns how many come back at which age, and keeps that up for evicted pages whose
    digests it remembers: else it could not see what it misses. What a page of class c and age a
    promises is its Gittins index,

        max over t of  P(used within t) / E[time until it is used, at most t],

    the most hits per time that keeping it for a while can give (J. Gittins, "Bandit processes and
    dynamic allocation indices", J. R. Statist. Soc. B 41, 1979; hit density as in Beckmann, Chen and
    Cidon's LHD, NSDI 2018, is the same with a fixed horizon). A page that was used more often is
    never worth less than another of the same age, so heads outlive the tails that need them.

    Time is the number of releases, and before anything is learned older pages go first, ends of
    sequences before all others. All operations are O(1) per page: the 168 cells, one per class
    and age, are looked through once per eviction of a run, and ranked again now and then.

    num_ghosts   evicted pages it remembers
    """

    def __init__(self, num_pages: int, num_ghosts: int) -> None:
        self._num_ghosts = num_ghosts
        self._ghosts: OrderedDict[Digest, _Batch] = OrderedDict()
        self._batch_of: list[_Batch | None] = [None] * num_pages  # None: not listed
        self._kinds = [UNKNOWN] * num_pages
        self._num_listed = 0
        self._digests: Run[Digest | None] = ()  # the pool's
        self._cells: list[list[OrderedDict[_Batch, None]]] = [
            [OrderedDict() for _ in range(NUM_AGES)] for _ in range(NUM_CLASSES)
        ]
        self._now = 0
        self._released = [0.0] * NUM_CLASSES
        self._used = [[0.0] * NUM_AGES for _ in range(NUM_CLASSES)]
        self._history: list[tuple[int, list[float]]] = []  # when, and _released then; oldest first
        self._order: list[OrderedDict[_Batch, None]] = []
        self._rerank_at = self._grow_at = 0
        self._halve_at = HALF_LIFE

    def __len__(self) -> int:
        return self._num_listed

    def __iter__(self) -> Iterator[PageId]:
        return (PageId(page) for page, batch in enumerate(self._batch_of) if batch is not None)

    def release(self, pages: Run[PageId], digests: Run[Digest | None]) -> None:
        self._digests = digests
        self._now += 1
        self._num_listed += len(pages)
        kinds, batch_of = self._kinds, self._batch_of
        batches: dict[int, _Batch] = {}
        last = UNKNOWN
        for page in reversed(pages):
            kind = kinds[page]
            if kind == UNKNOWN:
                kind = kinds[page] = self._recall(digests[page], is_tail=page == pages[0])
            if kind != last:
                batch = batches.get(kind) or batches.setdefault(kind, _Batch(kind, self._now))
                append, last = batch.pages.append, kind
            append(page)
            batch_of[page] = batch
        for kind, batch in batches.items():
            batch.num_live = len(batch.pages)
            batch.weight = 1 / len(pages)
            self._released[kind] += batch.num_live / len(pages)
            self._cells[kind][0][batch] = None

    def reuse(self, pages: Run[PageId]) -> None:
        kinds, batch_of = self._kinds, self._batch_of
        for page in pages:
            kinds[page] = _found_again(kinds[page])
            batch = batch_of[page]
            if batch is None:
                continue
            batch_of[page] = None
            self._num_listed -= 1
            self._learn(batch)
            batch.num_live -= 1
            if not batch.num_live:
                del self._cells[batch.kind][batch.age][batch]
            elif 2 * batch.num_live < len(batch.pages):
                batch.pages = [page for page in batch.pages if batch_of[page] is batch]

    def evict(self, num_pages: int) -> list[PageId]:
        if self._now >= self._grow_at:
            self._grow_older()
        if self._now >= self._rerank_at:
            self._rerank()
        evicted: list[PageId] = []
        for cell in self._order:
            while cell:
                batch = next(iter(cell))
                evicted += self._shrink(batch, num_pages - len(evicted))
                if batch.num_live:
                    break
                del cell[batch]
            if len(evicted) == num_pages:
                break
        self._num_listed -= num_pages
        ghosts = self._ghosts
        for _ in range(len(ghosts) - self._num_ghosts):
            ghosts.popitem(last=False)
        return evicted

    def _shrink(self, batch: _Batch, num_pages: int) -> list[PageId]:
        """Up to so many pages of a batch, which are no longer listed but remembered."""
        batch_of, kinds, digests = self._batch_of, self._kinds, self._digests
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
            kinds[page] = UNKNOWN
        return pages

    def _recall(self, digest: Digest | None, *, is_tail: bool) -> int:
        """The class of a page that is new, or was evicted and has been computed again."""
        assert digest is not None, "released without a digest"
        batch = self._ghosts.pop(digest, None)
        if batch is None:
            return TAIL if is_tail else NEW
        self._learn(batch)
        return _found_again(batch.kind)

    def _learn(self, batch: _Batch) -> None:
        """A page of this batch was wanted again."""
        age = bisect_right(AGES, self._now - batch.released_at) - 1
        self._used[batch.kind][age] += batch.weight

    def _grow_older(self) -> None:
        """Move batches to the cells of their ages; each moves at most NUM_AGES times, ever."""
        self._grow_at = self._now + YOUNG
        for cells in self._cells:
            for age in range(NUM_AGES - 2, -1, -1):
                cell, begin = cells[age], self._now - AGES[age + 1]
                while cell and (batch := next(iter(cell))).released_at <= begin:
                    del cell[batch]
                    batch.age = age + 1
                    cells[age + 1][batch] = None

    def _rerank(self) -> None:
        """Order the cells by what their pages promise; where that is equal, the oldest first."""
        now = self._now
        self._rerank_at = now + min(max(now // 8, RERANK_FIRST), RERANK_LAST)
        if now >= self._halve_at:
            self._halve_at = now + HALF_LIFE
            self._released = [count / 2 for count in self._released]
            self._used = [[count / 2 for count in used] for used in self._used]
            self._history = [(at, [count / 2 for count in counts]) for at, counts in self._history]
        reached = self._reached()
        guess = 0.5 / NUM_AGES / (sum(self._released) + 1)  # before anything comes back: LRU
        shares = [
            sum(used) / (sum(counts) + DOUBT) + guess
            for used, counts in zip(zip(*self._used, strict=True), reached, strict=True)
        ]
        ranked: list[tuple[float, int, int]] = []
        floor = [0.0] * NUM_AGES
        for kind in range(NUM_CLASSES):
            chances = [
                (count + PRIOR * share) / (counts[kind] + PRIOR)
                for count, share, counts in zip(self._used[kind], shares, reached, strict=True)
            ]
            floor = [max(low, value) for low, value in zip(floor, gittins_index(chances), strict=True)]
            ranked += [(value, -age, kind) for age, value in enumerate(floor)]
        ranked.sort()
        self._order = [self._cells[kind][-age] for _, age, kind in ranked]

    def _reached(self) -> list[list[float]]:
        """By age, how much of each class was released so long ago that it can have come back at
        that age: what is too young for it says nothing."""
        history = self._history
        history.append((self._now, list(self._released)))
        del history[: max(bisect_right(history, self._now - AGES[-1], key=itemgetter(0)) - 1, 0)]
        reached = []
        for age in AGES:  # from the next time that was noted: rather too many than too few
            index = bisect_left(history, self._now - age, key=itemgetter(0))
            reached.append(history[index][1])
        return reached


def _found_again(kind: int) -> int:
    """The class a page moves to when it is found."""
    return min(max(kind, NEW) + 1, NUM_CLASSES - 1)


def gittins_index(chances: Run[float]) -> list[float]:
    """By age, the best hits per time of keeping a page for a while, see ``Gittins``.

    chances   that a page is used at each age, and not before; if they add up to more than
              one, the first of them count
    """
    left = 1.0
    lasting = []  # the time that a page spends at each age, on average
    for chance, width in zip(chances, WIDTHS, strict=True):
        stay = max(left - chance, 0.0)
        lasting.append(width * max((left + stay) / 2, 1e-9))
        left = stay
    index = []
    for age in range(NUM_AGES):
        best = hits = time = 0.0
        for chance, spent in zip(chances[age:], lasting[age:], strict=True):
            hits += chance
            time += spent
            best = max(best, hits / time)
        index.append(best)
    return index
