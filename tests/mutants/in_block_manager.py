"""Bugs in who holds and finds which page."""

from __future__ import annotations

from mutant import Mutant

POOL = "block_manager/pool.py"
POLICY = "block_manager/policy.py"
MANAGER = "block_manager/manager.py"
DIGESTS = "block_manager/digests.py"

MUTANTS = (
    Mutant("take leaves the digest findable", POOL, "del page_of[digest]", "pass"),
    Mutant("take keeps the digest on the page", POOL, "digest_of[page] = None\n", "pass\n"),
    Mutant("take evicts the most recent", POLICY, "popitem(last=False)[0]", "popitem(last=True)[0]"),
    Mutant("take hands out pages nobody holds", POOL, "num_holders[page] = 1", "num_holders[page] = 0"),
    Mutant(
        "found pages stay idle",
        POLICY,
        "            if page in idle:\n                del idle[page]",
        "            pass",
    ),
    Mutant("found pages are not taken off the list", POOL, "self._cached.reuse(pages)", "pass"),
    Mutant("found pages are not counted", POOL, "num_holders[page] += 1\n            pages", "pages"),
    Mutant(
        "a prefix may have holes",
        POOL,
        "                break\n            num_holders",
        "                continue\n            num_holders",
    ),
    Mutant("forks do not count their pages", POOL, "self._num_holders[page] += 1", "pass"),
    Mutant("drop frees while others hold", POOL, "            if left:\n                continue\n", ""),
    Mutant(
        "contents of idle pages are lost",
        POOL,
        "if digest_of[page] is None:\n                self._empty",
        "if True:\n                self._empty",
    ),
    Mutant(
        "the last page of a digest wins",
        POOL,
        "page_of.setdefault(digest, page) is page",
        "page_of.update({digest: page}) is None",
    ),
    Mutant(
        "a published page counts as private",
        POOL,
        "return self._num_holders[page] == 1 and self._digest_of[page] is None",
        "return self._num_holders[page] == 1",
    ),
    Mutant(
        "a shared page counts as private",
        POOL,
        "return self._num_holders[page] == 1 and self._digest_of[page] is None",
        "return self._digest_of[page] is None",
    ),
    Mutant("digests ignore what came before", DIGESTS, "sha256(digest + packed", "sha256(packed"),
    Mutant("digests ignore the salt", DIGESTS, "+ salt)", ")"),
    Mutant(
        "digests keep their first parent", DIGESTS, "digest = sha256(digest +", "digest = sha256(parent +"
    ),
    Mutant(
        "the last token may be found",
        MANAGER,
        "num_pages = max(len(tokens) - 1, 0)",
        "num_pages = len(tokens)",
    ),
    Mutant(
        "the cache never hits",
        MANAGER,
        "hold_prefix(table.digests[:num_pages])",
        "hold_prefix(table.digests[:0])",
    ),
    Mutant(
        "reserve rounds down",
        MANAGER,
        "missing = -(-num_tokens // self.page_size)",
        "missing = num_tokens // self.page_size",
    ),
    Mutant("would_overflow is off by one", MANAGER, "return num_tokens > len", "return num_tokens >= len"),
    Mutant(
        "partial pages are published",
        MANAGER,
        "table.num_written // self.page_size, num_written // self.page_size",
        "table.num_written // self.page_size, -(-num_written // self.page_size)",
    ),
    Mutant(
        "commit publishes one page too few",
        MANAGER,
        "table.pages[first:last]), table.digests[first:last], parent",
        "table.pages[first:last - 1]), table.digests[first:last - 1], parent",
    ),
    Mutant(
        "fork shares the partial page",
        MANAGER,
        "num_full, partial = divmod(table.num_written, self.page_size)\n        target",
        "num_full, partial = -(-table.num_written // self.page_size), 0\n        target",
    ),
    Mutant(
        "fork forgets the salt",
        MANAGER,
        "            table.salt,\n            pages=shared",
        '            b"",\n            pages=shared',
    ),
    Mutant(
        "fork shares the list of digests",
        MANAGER,
        "digests=table.digests[:num_full],",
        "digests=table.digests,",
    ),
    Mutant("rollback keeps old digests", MANAGER, "del table.digests[num_full:]", "pass"),
    Mutant(
        "rollback writes where others read",
        MANAGER,
        "if not partial or self._pool.is_private(page := PageId(table.pages[num_full])):",
        "page = PageId(table.pages[0]) if table.pages else None\n        if True:",
    ),
    Mutant("rollback keeps the tail", MANAGER, "self._trim(table, num_full + (partial > 0))", "pass"),
    Mutant(
        "rollback leaks the source",
        MANAGER,
        "copy = self._copy(page, target[0])\n        self._pool.drop([page])",
        "copy = self._copy(page, target[0])",
    ),
    Mutant("copies do not hold their pages", MANAGER, "self._pool.hold((source, target))", "pass"),
    Mutant("close gives heads back before tails", MANAGER, "tail.reverse()", "pass"),
    Mutant(
        "a miss of the last token is called partial",
        MANAGER,
        "if tail == self.page_size else",
        "if tail > self.page_size else",
    ),
)
