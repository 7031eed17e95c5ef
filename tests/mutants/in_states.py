"""Bugs in recurrent states: which snapshot is taken, found and copied, how often a step advances a slot."""

from __future__ import annotations

from mutant import bug

MUTANTS = (
    # what is restored, and from where
    bug(
        "a rollback restores the state after the first page",
        "self.hold_snapshot(state, table.digests, num_pages)\n        if",
        "self.hold_snapshot(state, table.digests, 1)\n        if",
    ),
    bug(
        "a hit writes what runs over what was found",
        "copy(state.found, state.running)\n            self._release",
        "copy(state.running, state.found)\n            self._release",
    ),
    bug("a fork gets an empty state", "copy(running, slot)", "copy(slot, running)"),
    bug("a snapshot that runs is still found", "            self.pool.unpublish(state.found)\n", ""),
    bug(
        "a hit goes on from the state a page before",
        "self.pool.acquire([digests[num_pages - 1]])",
        "self.pool.acquire([digests[max(num_pages - 2, 0)]])",
    ),
    bug(
        "a state comes from the disk before its pages",
        "g.pool.prefix_length(digests) < len(digests) for",
        "g.pool.prefix_length(digests) < len(digests) - 1 for",
    ),
    # which snapshots are taken
    bug(
        "the junction is where states end",
        "digests, reach, after, with_state=False)",
        "digests, reach, after)",
    ),
    bug("no junction in a step's first page", "first <= junction <= last", "first < junction <= last"),
    bug("no junction where a step ends", "first <= junction <= last", "first <= junction < last"),
    bug("the tail is where a step ends", "tail = num_known // page_size", "tail = last"),
    bug("no tail", "if with_tail and", "if with_tail and not"),
    bug(
        "a snapshot has the name of the page before",
        "self.pool.publish([slot], [digests[num_pages - 1]], parent, salt=salt)",
        "self.pool.publish([slot], [digests[max(num_pages - 2, 0)]], parent, salt=salt)",
    ),
    bug(
        "snapshots that were planned are never given back",
        "        self._release([planned.slot for planned in dropped])\n",
        "",
    ),
    bug(
        "a snapshot that was there before is stepped down for itself",
        "if self.pool.is_published(slot) and not (is",
        "if not (is",
    ),
    bug(
        "a rollback before the first step keeps what was found",
        "before, state.found = state.found, None",
        "before = None if state.running is None else state.found",
    ),
    # what is given up, and what goes with it
    bug(
        "pages stay when the last snapshot behind them is lost",
        "pool.discard(lost)\n",
        "pool.discard(lost[:0])\n",
    ),
    bug(
        "pages go with the first of their snapshots",
        "            if self._counts[last]:\n                break\n            del",
        "            del",
    ),
    bug(
        "a page that goes leaves the snapshot after it",
        "            pool.on_forgotten = self.pool.discard\n",
        "            pass\n",
    ),
    bug(
        "the snapshot that promises most goes first",
        "heappush(self._heap, (self._value(record),",
        "heappush(self._heap, (-self._value(record),",
    ),
    bug(
        "a conversation whose snapshot is gone is a new one",
        "self._gone[digest] = self._records.pop(digest)",
        "self._records.pop(digest)",
    ),
    bug(
        "what comes back after it is gone teaches nothing",
        "record.seen.used[record.age] += 1",
        "record.seen.used[record.age] += 0",
    ),
    bug("want of slots makes pages dear", "PRICE_STEP**self", "PRICE_STEP**-self"),
    bug(
        "where pages are short the oldest go, whatever they promise",
        "for _ in range(num_pages - pool.num_idle_empty):",
        "for _ in range(0):",
    ),
    # how often a slot is advanced
    bug(
        "a step computed twice advances a state twice",
        "if stands != segment.position:",
        "if stands < segment.position:",
    ),
    bug(
        "a slot is never known to have advanced",
        "self._positions[list(segment.written)] = segment.stop",
        "self._positions[list(segment.written)] = segment.position",
    ),
    bug(
        "a copied slot does not say where it stands",
        "self._put(targets, self._rows(sources), self._positions[list(sources)].tolist())",
        "self._put(targets, self._rows(sources), self._positions[list(targets)].tolist())",
    ),
    bug(
        "a step's second part begins where the first did",
        "if other.wave == group.wave - 1",
        "if other.wave == group.wave",
    ),
    # rows that are mixed with those before
    bug("a row's shift is the row itself", "[[1.0], [0.0]]", "[[0.0], [1.0]]"),
    bug("a row and the one before change places", "reshape(-1, 2).T", "reshape(-1, 2)[:, ::-1].T"),
)
