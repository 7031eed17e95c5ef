"""Bugs in what the scheduler goes by: predictions, deadlines, accounts, orders, room; and in evictions."""

from __future__ import annotations

from mutant import bug

MUTANTS = (
    bug("passed: as good as others", "self._passed[page] = None", "self._policy.release([page], digests)"),
    bug("passed: the latest goes first", "passed.popitem(last=False)[0]", "passed.popitem(last=True)[0]"),
    bug("passed: nobody parts anywhere", "for end in table.partings for page", "for end in () for page"),
    bug(
        "passed: where a sequence parts is not learned",
        "(num_pages, reach) if self._full",
        "(num_pages,) if self._full",
    ),
    bug("passed: a fork knows of no parting", "            partings=table.partings,\n", ""),
    bug("who waits for time is looked at in every step", " or not self._targets.has_time():", ":"),
    bug("parallel samples count as one row", "members = 1 + len(each.parallel_samples)\n", "members = 1\n"),
    bug(
        "a target of one's own counts for nobody",
        "latency.limit(decodes, self._targets.tightest(item.sequence for item in work))",
        "latency.limit(decodes)",
    ),
    bug(
        "those who run have no targets of their own",
        "StepShape(num_rows, 0, num_positions, 0), self.tightest(running))",
        "StepShape(num_rows, 0, num_positions, 0), None)",
    ),
    bug("time is not spent", "self._time.spend(len(sequence.tokens) - wanted, num_tokens)", "pass"),
    bug("a chunk without time stops nobody", "self.left = in_time  # there", "pass  # there"),
    bug(
        "the cost of positions is not learned",
        "return (1.0, decodes / 16, chunk_tokens / 64, positions / 8192, chunk_positions / 65536)",
        "return (1.0, decodes / 16, chunk_tokens / 64, 0.0, 0.0)",
    ),
    bug("errors are not relative", "scale = 1 / seconds  # relative errors", "scale = 1.0"),
    bug("coefficients may be negative", "if x > 0.0:", "if True:"),
    bug("old steps count for ever", "_FORGETTING = 0.995", "_FORGETTING = 1.0"),
    bug(
        "a step without prompts teaches positions wrongly", "aa * a + ba * b + da * d\n", "aa * a + ba * b\n"
    ),
    bug("a predicted step may take all of the target", "MOST_HEADROOM, 1 / (1 +", "9.9, 1.5 + (1 +"),
    bug("errors of predictions leave no room", "LATE_FACTOR = 1.6", "LATE_FACTOR = 0.0"),
    bug("a stall counts in full", "min(1.0, abs(seconds / predicted - 1))", "abs(seconds / predicted - 1)"),
    bug("parts of tiles cost a part", "chunk_tokens += -(decodes", "chunk_tokens += 0 * -(decodes"),
    bug("prompts starve under a tight target", "MIN_CHUNK = 8", "MIN_CHUNK = 0"),
    bug("the first chunk takes all", "if not self._taught:", "if False:"),
    bug("one runs at a time", "MIN_RUNNING = 4", "MIN_RUNNING = 1"),
    bug("a target that one cannot meet lets in nobody", "or target * DECODE_SHARE < one else", "else"),
    bug("decodes may take the whole target", "DECODE_SHARE = 0.7", "DECODE_SHARE = 1.4"),
    bug(
        "what is cached makes nobody early",
        "missing = len(sequence.tokens) - cached_tokens(sequence, self._blocks)",
        "missing = len(sequence.tokens)",
    ),
    bug("shared pages are lost work", "table.num_written - blocks.num_shared(table)", "table.num_written"),
    bug("parallel samples take no room", "for sample in sequence.parallel_samples:", "for sample in ():"),
    bug("room is counted for the newcomer alone", "for member in members:\n", "for member in (sequence,):\n"),
    bug(
        "who gave way has lost its place",
        "        if sequence in self._interrupted:\n            return 0, 0, sequence\n",
        "",
    ),
    bug(
        "a successor is as young as can be", "        successor.num_overtaken = sequence.num_overtaken\n", ""
    ),
    bug(
        "who gave way overtakes others",
        "            return\n        if ran:",
        "            pass\n        if ran:",
    ),
    bug(
        "short prompts pass a long one for ever",
        "oldest is sequence or oldest.num_overtaken < MAX_PASSED",
        "oldest is sequence or True",
    ),
    bug("who gave way is passed for ever", "if ran and _times_overtaken(ran) >= MAX_OVERTAKEN:", "if False:"),
    bug(
        "whoever gave way last comes back first",
        "return sum(each.num_admitted_before < sequence.num_admitted_before for each in ran)",
        "return 0 * len(ran)",
    ),
    bug(
        "passes are forgotten when one comes back",
        "max(others[0].num_overtaken, sequence.num_overtaken)",
        "0",
    ),
    bug(
        "who gave way comes back by what is cached",
        "return 0, 0, sequence",
        "return 0, self._preference(sequence), sequence",
    ),
    bug(
        "the level rises to whoever had most",
        "least = min([service[tenant] for tenant in lanes])",
        "least = max([service[tenant] for tenant in lanes])",
    ),
    bug(
        "a tenant that comes back has all its quanta",
        "max(priority_class.service.get(tenant, 0.0), floor)",
        "floor",
    ),
    bug("head starts lower the level", "priority_class.level, floor\n        )", "0.0, floor\n        )"),
    bug(
        "the most served goes on",
        "s.priority == lowest and self._service(s) == most]",
        "s.priority == lowest]",
    ),
    bug(
        "a tenant's output is charged by step",
        "cost = (stop - start - prompt) * self",
        "cost = min(1, stop - start - prompt) * self",
    ),
    bug(
        "who is next goes by counters that lag",
        "        self._settle()\n        return super().offers()",
        "        return super().offers()",
    ),
    bug(
        "who comes back is lifted to counters that lag",
        "        self._settle()\n        return super()._open_lane(sequence)",
        "        return super()._open_lane(sequence)",
    ),
    bug(
        "who was served least comes last",
        "heap = [(service[tenant], index",
        "heap = [(-service[tenant], index",
    ),
    bug(
        "turns are not taken again",
        "(service[tenant], index, tenant, passed + 1)",
        "(service[tenant], index, tenant, len(line))",
    ),
    bug(
        "priorities queue by age",
        "while index and self._waiting[index - 1].priority > sequence.priority:",
        "while False:",
    ),
    bug(
        "who gave way queues before the more urgent",
        "if s.priority >= sequence.priority)\n        index",
        "if True)\n        index",
    ),
    bug(
        "long prompts hold back the more urgent",
        "return running.priority <= sequence.priority",
        "return True",
    ),
    bug(
        "priorities have no order",
        "for priority in sorted(self._classes):\n            yield from self._choose",
        "for priority in self._classes:\n            yield from self._choose",
    ),
    bug(
        "who gave way is its tenant's last",
        "lane.insert(self._order.num_before(sequence, lane), sequence)",
        "lane.append(sequence)",
    ),
    bug(
        "prompts that are computed again count as cached",
        "if sequence.skip_prefix_cache or not blocks.prefix_cache:",
        "if not blocks.prefix_cache:",
    ),
    bug("what was looked up stays so", "for sequence in (*new, *stale):", "for sequence in new:"),
)
