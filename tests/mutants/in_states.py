"""Bugs in recurrent states: which snapshot is taken, found and copied, how often a step advances a slot."""

from __future__ import annotations

from mutant import Mutant

GROUP = "block_manager/state_group.py"
POLICY = "block_manager/snapshot_policy.py"
ORDER = "block_manager/snapshot_order.py"
COVERED = "block_manager/covered_pages.py"
SEARCH = "block_manager/prefix_search.py"
MANAGER = "block_manager/manager.py"
POOL = "engine/executor/recurrent/state_pool.py"
CUTS = "engine/executor/recurrent/cuts.py"

MUTANTS = (
    # what is restored, and from where
    Mutant(
        "a rollback restores the state after the first page",
        GROUP,
        "self.hold_snapshot(state, table.digests, num_pages)\n        if",
        "self.hold_snapshot(state, table.digests, 1)\n        if",
    ),
    Mutant(
        "a hit writes what runs over what was found",
        GROUP,
        "copy(state.found, state.running))\n            self._release",
        "copy(state.running, state.found))\n            self._release",
    ),
    Mutant("a fork gets an empty state", GROUP, "copy(running, slot)", "copy(slot, running)"),
    Mutant(
        "a snapshot that runs is still found", GROUP, "            self.pool.unpublish(state.found)\n", ""
    ),
    Mutant(
        "a hit goes on from the state a page before",
        GROUP,
        "self.pool.acquire([digests[num_pages - 1]])",
        "self.pool.acquire([digests[max(num_pages - 2, 0)]])",
    ),
    Mutant(
        "a state comes from the disk before its pages",
        MANAGER,
        "g.pool.prefix_length(digests) < len(digests) for",
        "g.pool.prefix_length(digests) < len(digests) - 1 for",
    ),
    # which snapshots are taken
    Mutant(
        "the junction is where states end",
        SEARCH,
        "len(digests), after, with_state=False)",
        "len(digests), after)",
    ),
    Mutant(
        "no junction in a step's first page", POLICY, "first <= junction <= last", "first < junction <= last"
    ),
    Mutant("no junction where a step ends", POLICY, "first <= junction <= last", "first <= junction < last"),
    Mutant("the tail is where a step ends", POLICY, "tail = num_known // page_size", "tail = last"),
    Mutant("no tail", POLICY, "if with_tail and", "if with_tail and not"),
    Mutant(
        "a snapshot has the name of the page before",
        GROUP,
        "self.pool.publish([slot], [digests[num_pages - 1]], parent, salt=salt)",
        "self.pool.publish([slot], [digests[max(num_pages - 2, 0)]], parent, salt=salt)",
    ),
    Mutant(
        "snapshots that were planned are never given back",
        GROUP,
        "        self._release([planned.slot for planned in dropped])\n",
        "",
    ),
    Mutant(
        "a snapshot that was there before is stepped down for itself",
        GROUP,
        "if self.pool.is_published(slot) and not (is",
        "if not (is",
    ),
    Mutant(
        "a rollback before the first step keeps what was found",
        GROUP,
        "before, state.found = state.found, None",
        "before = None if state.running is None else state.found",
    ),
    # what is given up, and what goes with it
    Mutant(
        "pages stay when the last snapshot behind them is lost",
        GROUP,
        "pool.discard(lost)\n",
        "pool.discard(lost[:0])\n",
    ),
    Mutant(
        "pages go with the first of their snapshots",
        COVERED,
        "            if self._counts[last]:\n                break\n            del",
        "            del",
    ),
    Mutant(
        "a page that goes leaves the snapshot after it",
        GROUP,
        "            pool.on_forgotten = self.pool.discard\n",
        "            pass\n",
    ),
    Mutant(
        "the snapshot that promises most goes first",
        ORDER,
        "heappush(self._heap, (self._value(record),",
        "heappush(self._heap, (-self._value(record),",
    ),
    Mutant(
        "a conversation whose snapshot is gone is a new one",
        ORDER,
        "self._gone[digest] = self._records.pop(digest)",
        "self._records.pop(digest)",
    ),
    Mutant(
        "what comes back after it is gone teaches nothing",
        ORDER,
        "record.seen.used[record.age] += 1",
        "record.seen.used[record.age] += 0",
    ),
    Mutant("want of slots makes pages dear", ORDER, "PRICE_STEP**self", "PRICE_STEP**-self"),
    Mutant(
        "where pages are short the oldest go, whatever they promise",
        GROUP,
        "for _ in range(num_pages - pool.num_idle_empty):",
        "for _ in range(0):",
    ),
    # how often a slot is advanced
    Mutant(
        "a step computed twice advances a state twice",
        POOL,
        "if stands != segment.position:",
        "if stands < segment.position:",
    ),
    Mutant(
        "a slot is never known to have advanced",
        POOL,
        "self._positions[list(segment.written)] = segment.stop",
        "self._positions[list(segment.written)] = segment.position",
    ),
    Mutant(
        "a copied slot does not say where it stands",
        POOL,
        "self._put(targets, self._rows(sources), self._positions[list(sources)].tolist())",
        "self._put(targets, self._rows(sources), self._positions[list(targets)].tolist())",
    ),
    Mutant(
        "a step's second part begins where the first did",
        POOL,
        "if other.wave == group.wave - 1",
        "if other.wave == group.wave",
    ),
    # rows that are mixed with those before
    Mutant("a row's shift is the row itself", CUTS, "[[1.0], [0.0]]", "[[0.0], [1.0]]"),
    Mutant("a row and the one before change places", CUTS, "reshape(-1, 2).T", "reshape(-1, 2)[:, ::-1].T"),
)
