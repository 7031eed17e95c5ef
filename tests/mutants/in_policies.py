"""Bugs in what the scheduler goes by: predictions, deadlines, accounts, orders and room to grow."""

from __future__ import annotations

from mutant import Mutant

SCHEDULER = "scheduler/scheduler.py"
ARRIVALS = "scheduler/arrivals.py"
TARGETS = "scheduler/targets.py"
BUDGET = "scheduler/budget.py"
COST = "scheduler/step_cost.py"
TARGET = "scheduler/latency_target.py"
PACE = "scheduler/prompt_pace.py"
PREEMPTION = "scheduler/preemption.py"
AGE = "scheduler/waiting/age_order.py"
DEFICITS = "scheduler/waiting/deficits.py"
FAIR = "scheduler/waiting/fair.py"
FIRST_COME = "scheduler/waiting/first_come.py"
LANES = "scheduler/waiting/lanes.py"
LENGTHS = "scheduler/waiting/cached_lengths.py"

MUTANTS = (
    Mutant(
        "who waits for time is looked at in every step",
        ARRIVALS,
        " or not self._targets.has_time():",
        ":",
    ),
    Mutant(
        "parallel samples count as one row",
        TARGETS,
        "members = 1 + len(each.parallel_samples)\n",
        "members = 1\n",
    ),
    Mutant(
        "a target of one's own counts for nobody",
        SCHEDULER,
        "latency.limit(decodes, self._targets.tightest(item.sequence for item in work))",
        "latency.limit(decodes)",
    ),
    Mutant(
        "those who run have no targets of their own",
        TARGETS,
        "StepShape(num_rows, 0, num_positions, 0), self.tightest(running))",
        "StepShape(num_rows, 0, num_positions, 0), None)",
    ),
    Mutant(
        "time is not spent", BUDGET, "self._time.spend(len(sequence.tokens) - wanted, num_tokens)", "pass"
    ),
    Mutant("a chunk without time stops nobody", BUDGET, "self.left = in_time  # there", "pass  # there"),
    Mutant(
        "the cost of positions is not learned",
        COST,
        "return (1.0, decodes / 16, chunk_tokens / 64, positions / 8192, chunk_positions / 65536)",
        "return (1.0, decodes / 16, chunk_tokens / 64, 0.0, 0.0)",
    ),
    Mutant("errors are not relative", COST, "scale = 1 / seconds  # relative errors", "scale = 1.0"),
    Mutant("coefficients may be negative", COST, "if x > 0.0:", "if True:"),
    Mutant("old steps count for ever", COST, "_FORGETTING = 0.995", "_FORGETTING = 1.0"),
    Mutant(
        "a step without prompts teaches positions wrongly",
        COST,
        "aa * a + ba * b + da * d\n",
        "aa * a + ba * b\n",
    ),
    Mutant(
        "a predicted step may take all of the target", TARGET, "MOST_HEADROOM, 1 / (1 +", "9.9, 1.5 + (1 +"
    ),
    Mutant("errors of predictions leave no room", TARGET, "LATE_FACTOR = 1.6", "LATE_FACTOR = 0.0"),
    Mutant(
        "a stall counts in full",
        TARGET,
        "min(1.0, abs(seconds / predicted - 1))",
        "abs(seconds / predicted - 1)",
    ),
    Mutant("parts of tiles cost a part", COST, "chunk_tokens += -(decodes", "chunk_tokens += 0 * -(decodes"),
    Mutant("prompts starve under a tight target", TARGET, "MIN_CHUNK = 8", "MIN_CHUNK = 0"),
    Mutant("the first chunk takes all", TARGET, "if not self._taught:", "if False:"),
    Mutant("one runs at a time", TARGET, "MIN_RUNNING = 4", "MIN_RUNNING = 1"),
    Mutant(
        "a target that one cannot meet lets in nobody", TARGET, "or target * DECODE_SHARE < one else", "else"
    ),
    Mutant("decodes may take the whole target", TARGET, "DECODE_SHARE = 0.7", "DECODE_SHARE = 1.4"),
    Mutant(
        "what is cached makes nobody early",
        PACE,
        "missing = len(sequence.tokens) - cached_tokens(sequence, self._blocks)",
        "missing = len(sequence.tokens)",
    ),
    Mutant(
        "shared pages are lost work",
        PREEMPTION,
        "table.num_written - blocks.num_shared(table)",
        "table.num_written",
    ),
    Mutant(
        "parallel samples take no room",
        PREEMPTION,
        "for sample in sequence.parallel_samples:",
        "for sample in ():",
    ),
    Mutant(
        "room is counted for the newcomer alone",
        PREEMPTION,
        "for member in members:\n",
        "for member in (sequence,):\n",
    ),
    Mutant(
        "who gave way has lost its place",
        AGE,
        "        if sequence in self._interrupted:\n            return 0, 0, sequence\n",
        "",
    ),
    Mutant(
        "a successor is as young as can be",
        AGE,
        "        successor.num_overtaken = sequence.num_overtaken\n",
        "",
    ),
    Mutant(
        "who gave way overtakes others",
        AGE,
        "            return\n        if ran:",
        "            pass\n        if ran:",
    ),
    Mutant(
        "short prompts pass a long one for ever",
        AGE,
        "oldest is sequence or oldest.num_overtaken < MAX_PASSED",
        "oldest is sequence or True",
    ),
    Mutant(
        "who gave way is passed for ever",
        AGE,
        "if ran and _times_overtaken(ran) >= MAX_OVERTAKEN:",
        "if False:",
    ),
    Mutant(
        "whoever gave way last comes back first",
        AGE,
        "return sum(each.num_admitted_before < sequence.num_admitted_before for each in ran)",
        "return 0 * len(ran)",
    ),
    Mutant(
        "passes are forgotten when one comes back",
        AGE,
        "max(others[0].num_overtaken, sequence.num_overtaken)",
        "0",
    ),
    Mutant(
        "who gave way comes back by what is cached",
        AGE,
        "return 0, 0, sequence",
        "return 0, self._preference(sequence), sequence",
    ),
    Mutant(
        "the level rises to whoever had most",
        DEFICITS,
        "least = min([service[tenant] for tenant in lanes])",
        "least = max([service[tenant] for tenant in lanes])",
    ),
    Mutant(
        "a tenant that comes back has all its quanta",
        DEFICITS,
        "max(priority_class.service.get(tenant, 0.0), floor)",
        "floor",
    ),
    Mutant(
        "head starts lower the level", FAIR, "priority_class.level, floor\n        )", "0.0, floor\n        )"
    ),
    Mutant(
        "the most served goes on",
        FAIR,
        "s.priority == lowest and self._service(s) == most]",
        "s.priority == lowest]",
    ),
    Mutant(
        "a tenant's output is charged by step",
        FAIR,
        "cost = (stop - start - prompt) * self",
        "cost = min(1, stop - start - prompt) * self",
    ),
    Mutant(
        "who is next goes by counters that lag",
        FAIR,
        "        self._settle()\n        return super().offers()",
        "        return super().offers()",
    ),
    Mutant(
        "who comes back is lifted to counters that lag",
        FAIR,
        "        self._settle()\n        return super()._open_lane(sequence)",
        "        return super()._open_lane(sequence)",
    ),
    Mutant(
        "who was served least comes last",
        FAIR,
        "heap = [(service[tenant], index",
        "heap = [(-service[tenant], index",
    ),
    Mutant(
        "turns are not taken again",
        FAIR,
        "(service[tenant], index, tenant, passed + 1)",
        "(service[tenant], index, tenant, len(line))",
    ),
    Mutant(
        "priorities queue by age",
        FIRST_COME,
        "while index and self._waiting[index - 1].priority > sequence.priority:",
        "while False:",
    ),
    Mutant(
        "who gave way queues before the more urgent",
        FIRST_COME,
        "if s.priority >= sequence.priority)\n        index",
        "if True)\n        index",
    ),
    Mutant(
        "long prompts hold back the more urgent",
        FIRST_COME,
        "return running.priority <= sequence.priority",
        "return True",
    ),
    Mutant(
        "priorities have no order",
        LANES,
        "for priority in sorted(self._classes):\n            yield from self._choose",
        "for priority in self._classes:\n            yield from self._choose",
    ),
    Mutant(
        "who gave way is its tenant's last",
        LANES,
        "lane.insert(self._order.num_before(sequence, lane), sequence)",
        "lane.append(sequence)",
    ),
    Mutant(
        "prompts that are computed again count as cached",
        LENGTHS,
        "if sequence.skip_prefix_cache or not blocks.prefix_cache:",
        "if not blocks.prefix_cache:",
    ),
    Mutant("what was looked up stays so", LENGTHS, "for sequence in (*new, *stale):", "for sequence in new:"),
)
