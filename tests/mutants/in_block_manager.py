"""Bugs in who holds and finds which page."""

from __future__ import annotations

from mutant import Mutant

POOL = "block_manager/pool.py"
POLICY = "block_manager/policy.py"
MANAGER = "block_manager/manager.py"
COPIES = "block_manager/copies.py"
MISSES = "block_manager/misses.py"
GROUP = "block_manager/group.py"
GROUPS = "block_manager/groups.py"
DIGESTS = "block_manager/digests.py"

MUTANTS = (
    Mutant("take leaves the digest findable", POOL, "del page_of[digest]", "pass"),
    Mutant("take keeps the digest on the page", POOL, "digest_of[page] = None\n", "pass\n"),
    Mutant(
        "take evicts the most recent", POLICY, "islice(idle, num_pages)", "islice(reversed(idle), num_pages)"
    ),
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
    Mutant("drop frees while others hold", POOL, "            if left:\n", "            if False:\n"),
    Mutant(
        "contents of idle pages are lost",
        POOL,
        "elif digest_of[page] is None:\n                self._empty",
        "elif True:\n                self._empty",
    ),
    Mutant("a run is published over another", POOL, "page_of.keys().isdisjoint(new)", "True"),
    Mutant("only the first evictions are explained", MISSES, "self._indexed = end", "self._indexed = 2**62"),
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
    Mutant("digests ignore what came before", DIGESTS, "sha256(digest + page", "sha256(page"),
    Mutant("digests ignore the salt", DIGESTS, "+ salt)", ")"),
    Mutant(
        "digests keep their first parent", DIGESTS, "digest = sha256(digest +", "digest = sha256(parent +"
    ),
    Mutant(
        "the last token may be found",
        MANAGER,
        "            num_pages = max(len(tokens) - 1, 0)",
        "            num_pages = len(tokens)",
    ),
    Mutant(
        "the cache never hits",
        MANAGER,
        "self._groups.find(table, table.digests[:num_pages])",
        "self._groups.find(table, [])",
    ),
    Mutant(
        "reserve rounds down",
        GROUP,
        "return max(-(-num_tokens // self._page_size), promised)",
        "return max(num_tokens // self._page_size, promised)",
    ),
    Mutant(
        "would_overflow is off by one", MANAGER, "return num_tokens > table", "return num_tokens >= table"
    ),
    Mutant(
        "partial pages are published",
        MANAGER,
        "table.num_written // self.page_size, num_written // self.page_size",
        "table.num_written // self.page_size, -(-num_written // self.page_size)",
    ),
    Mutant(
        "commit publishes one page too few",
        GROUPS,
        "        digests = table.digests[first:last]\n",
        "        last -= 1\n        digests = table.digests[first:last]\n",
    ),
    Mutant(
        "fork shares the partial page",
        COPIES,
        "num_full, partial = divmod(table.num_written, self._page_size)\n        if partial and",
        "num_full, partial = -(-table.num_written // self._page_size), 0\n        if partial and",
    ),
    Mutant(
        "fork forgets the salt",
        COPIES,
        "            table.salt,\n            parts",
        '            b"",\n            parts',
    ),
    Mutant(
        "fork shares the list of digests",
        COPIES,
        "digests=table.digests[:num_full],",
        "digests=table.digests,",
    ),
    Mutant("rollback keeps old digests", COPIES, "del table.digests[num_full:]", "pass"),
    Mutant(
        "rollback writes where others read",
        COPIES,
        "return self._own_partial_page(table, num_full) if partial else ()",
        "return ()",
    ),
    Mutant("rollback keeps the tail", COPIES, "self._groups.trim(table, num_full + (partial > 0))", "pass"),
    Mutant(
        "rollback leaks the source",
        COPIES,
        "            group.pool.drop([page])\n",
        "",
    ),
    Mutant("copies do not hold their pages", COPIES, "group.pool.hold((copy.source, copy.target))", "pass"),
    Mutant("close gives heads back before tails", GROUP, "tail.reverse()", "pass"),
    Mutant(
        "a miss of the last token is called partial",
        MISSES,
        "if tail == self._page_size else",
        "if tail > self._page_size else",
    ),
    Mutant(
        "windows give back a page too many", GROUP, "num_written - window + 1,", "num_written - window + 2,"
    ),
    Mutant("windows give nothing back", GROUP, "if first < last:", "if first > last + 1000:"),
    Mutant("a window's entries are not erased", GROUP, "part.released = last", "part.released = first"),
    Mutant(
        "kept pages are given back", GROUP, "self.num_kept = -(-spec.keep", "self.num_kept = 0 * -(-spec.keep"
    ),
    Mutant("kept pages are rounded down", GROUP, "-(-spec.keep // page_size)", "spec.keep // page_size"),
    Mutant(
        "kept pages need not be found",
        GROUP,
        "yield from range(min(first, self.num_kept) - 1, -1, -1)",
        "yield from ()",
    ),
    Mutant(
        "a hit needs its last page only",
        GROUP,
        "yield from range(num_pages - 1, first - 1, -1)",
        "yield num_pages - 1",
    ),
    Mutant(
        "a window needs all pages before it",
        GROUP,
        "first = self.first_visible(num_pages * self._page_size, quantize_after)\n        yield",
        "first = 0\n        yield",
    ),
    Mutant("twins stay for good", GROUP, "window = self._outer if", "window = self._outer if True or"),
    Mutant(
        "twins are given back before their time",
        GROUP,
        "window = self._outer if num_written < quantize_after else",
        "window = self._outer if False else",
    ),
    Mutant("no twin is found again", GROUP, "(quantize_after - 1) // self._page_size)", "0)"),
    Mutant(
        "kept twins are not published",
        GROUP,
        "return max(self.num_kept, (quantize",
        "return max(0, (quantize",
    ),
    Mutant(
        "a fork forgets when it is quantized",
        COPIES,
        "            quantize_after=table.quantize_after,\n",
        "",
    ),
    Mutant(
        "twins of short sequences are not counted",
        GROUP,
        "max(window, min(quantize_after,",
        "max(window, min(0,",
    ),
    Mutant(
        "a fork holds what a window gave back",
        GROUP,
        "min(part.released, num_pages))\n        self.pool.hold",
        "0)\n        self.pool.hold",
    ),
    Mutant(
        "found windows do not say what is left out",
        GROUP,
        "return GroupPages(pages, first)",
        "return GroupPages(pages)",
    ),
    Mutant(
        "what was promised is taken by others",
        GROUP,
        "promised = -(-table.promised // self._page_size)",
        "promised = 0",
    ),
    Mutant(
        "a window is promised no chunk",
        GROUP,
        "pages_touched(window - 1 + max_chunk,",
        "pages_touched(window,",
    ),
    Mutant("rollback reads what a window gave back", GROUPS, "return any(", "return False and any("),
    Mutant("rollback ends where one group can go on", GROUPS, "if shorter == num_pages:", "if True:"),
    Mutant("rollback leaves holes in a window", GROUP, "if first < part.released:", "if False:"),
    Mutant(
        "the other groups are not published",
        GROUPS,
        "group.pool.publish(pages,",
        "group.index or group.pool.publish(pages,",
    ),
    Mutant(
        "a short group is not noticed", GROUPS, "> group.pool.num_idle:", "> self._groups[0].pool.num_idle:"
    ),
    Mutant(
        "a fork looks for room in one group",
        COPIES,
        "not all(self._groups.idle_pages())",
        "not self._groups[0].pool.num_idle",
    ),
    Mutant("copies forget their group", COPIES, "PageId(target), group.index)", "PageId(target), 0)"),
    Mutant(
        "a lost window page is news",
        GROUPS,
        "missing = group.missing(table, num_pages)",
        "missing = self._groups[0].missing(table, num_pages)",
    ),
)
