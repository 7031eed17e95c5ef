"""Bugs in how pages of those that give way are kept, and brought back."""

from __future__ import annotations

from mutant import bug

MUTANTS = (
    bug("who gives way keeps nothing", "            self._resumption.gives_way(victim)\n", ""),
    bug(
        "others take the room of one on its way back",
        "if self._resumption.holds_up(sequence) or not",
        "if not",
    ),
    bug(
        "the core spins while pages are on their way",
        "bool(self._queues.waiting) and not self._resumption.holds_up_all()\n\n",
        "bool(self._queues.waiting)\n\n",
    ),
    bug(
        "who comes back has lost its place", "self._queues.resume(sequence)", "self._queues.enqueue(sequence)"
    ),
    bug("the more urgent wait, too", "each.priority <= sequence.priority", "True"),
    bug("who is aborted is still on its way", "        self._loading.remove(sequence)\n", ""),
    bug("pages are asked for again and again", "        sequence.may_load = False\n", ""),
    bug("copies outgrow their memory", "while self._num_bytes > self._max_bytes:", "while False:"),
    bug(
        "copies of one page for another",
        "(each.fetch.digests[index], group))",
        "(each.fetch.digests[0], group))",
    ),
    bug("slow memory is used anyway", "if self.seconds(num_bytes) < limit_s:", "if True:"),
    bug("a store that was slow is never tried again", "self._seconds *= HOPE", "pass"),
    bug("pages that are there are fetched", "            if not self.known[number][index]\n", ""),
)
