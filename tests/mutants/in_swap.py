"""Bugs in how pages of those that give way are kept, and brought back."""

from __future__ import annotations

from mutant import Mutant

SCHEDULER = "scheduler/scheduler.py"
ARRIVALS = "scheduler/arrivals.py"
RESUMPTION = "scheduler/resumption.py"
HOST = "engine/kv_store/host_tier.py"
RATE = "engine/kv_store/rate.py"
PREFETCH = "engine/kv_store/prefetch.py"

MUTANTS = (
    Mutant("who gives way keeps nothing", SCHEDULER, "            self._resumption.gives_way(victim)\n", ""),
    Mutant(
        "others take the room of one on its way back",
        ARRIVALS,
        "if self._resumption.holds_up(sequence) or not",
        "if not",
    ),
    Mutant(
        "the core spins while pages are on their way",
        SCHEDULER,
        "bool(self._queues.waiting) and not self._resumption.holds_up_all()\n\n",
        "bool(self._queues.waiting)\n\n",
    ),
    Mutant(
        "who comes back has lost its place",
        RESUMPTION,
        "self._queues.resume(sequence)",
        "self._queues.enqueue(sequence)",
    ),
    Mutant("the more urgent wait, too", RESUMPTION, "each.priority <= sequence.priority", "True"),
    Mutant("who is aborted is still on its way", RESUMPTION, "        self._loading.remove(sequence)\n", ""),
    Mutant("pages are asked for again and again", RESUMPTION, "        sequence.may_load = False\n", ""),
    Mutant("copies outgrow their memory", HOST, "while self._num_bytes > self._max_bytes:", "while False:"),
    Mutant(
        "copies of one page for another",
        HOST,
        "(each.fetch.digests[index], group))",
        "(each.fetch.digests[0], group))",
    ),
    Mutant("slow memory is used anyway", RATE, "if self.seconds(num_bytes) < limit_s:", "if True:"),
    Mutant("a store that was slow is never tried again", RATE, "self._seconds *= HOPE", "pass"),
    Mutant(
        "pages that are there are fetched", PREFETCH, "            if not self.known[number][index]\n", ""
    ),
)
