"""Bugs in who computes what, and who has which pages then."""

from __future__ import annotations

from mutant import Mutant

SCHEDULER = "scheduler/scheduler.py"
ARRIVALS = "scheduler/arrivals.py"
PLAN_AHEAD = "scheduler/plan_ahead.py"
QUEUES = "scheduler/sequence_queues.py"
FAIR = "scheduler/waiting/fair.py"
TYPES = "scheduler/types.py"

MUTANTS = (
    Mutant(
        "arrivals do not spend the budget",
        ARRIVALS,
        "budget.spend(sequence, append_chunk(work, sequence, tokens), wanted)\n        self._queues",
        "append_chunk(work, sequence, tokens)\n        self._queues",
    ),
    Mutant(
        "chunks do not spend the budget",
        SCHEDULER,
        "                budget.spend(sequence, append_chunk(work, sequence, tokens), wanted)",
        "                append_chunk(work, sequence, tokens)",
    ),
    Mutant(
        "long prompts take everything",
        "scheduler/budget.py",
        "max(1, self.left - self._short_demand(sequence.priority, rivals))",
        "self.left",
    ),
    Mutant(
        "nobody passes a long prompt that waits",
        ARRIVALS,
        "                blocked, passed = blocked or sequence, passed + 1\n                continue",
        "                break",
    ),
    Mutant(
        "prompt chunks stop decodes",
        SCHEDULER,
        "elif stop <= table.capacity or self._make_room(sequence, stop, work, preempted):",
        "elif not chunks and self._make_room(sequence, stop, work, preempted):",
    ),
    Mutant(
        "one sequence too many runs",
        ARRIVALS,
        "len(self._queues.running) == self._limits.max_running:\n                break",
        "len(self._queues.running) > self._limits.max_running:\n                break",
    ),
    Mutant("arrivals come in while others are preempted", SCHEDULER, "if not preempted and", "if"),
    Mutant(
        "arrivals get pages for a chunk only",
        ARRIVALS,
        "blocks.reserve(table, table.num_written + tokens, ahead=len(sequence.tokens))",
        "blocks.reserve(table, table.num_written + tokens)",
    ),
    Mutant("a planned sequence may be preempted", SCHEDULER, "+ 1 :] if s not in planned]", "+ 1 :]]"),
    Mutant(
        "whoever gave way comes back to any room",
        "scheduler/preemption.py",
        "most = (1 << min(times, MAX_CAUTION)) - 1",
        "most = 0",
    ),
    Mutant(
        "others' first tokens wait for chunks of long prompts",
        FAIR,
        "self._is_short or ends\n        return ends",
        "ends\n        return False",
    ),
    Mutant("whoever loses most gives way", "scheduler/waiting/base.py", "min(equals,", "max(equals,"),
    Mutant("the oldest is preempted", SCHEDULER, "running[running.index(sequence) + 1 :]", "running"),
    Mutant("a refused arrival never comes in", ARRIVALS, "not self._has_more_idle(self._refused[1])", "True"),
    Mutant(
        "a refused arrival keeps its pages",
        ARRIVALS,
        "            blocks.close(table)\n            self._refused = ",
        "            self._refused = ",
    ),
    Mutant(
        "who waits for a page keeps others",
        ARRIVALS,
        "            blocks.close(table)\n            return Admission.SHARES",
        "            return Admission.SHARES",
    ),
    Mutant("salts are forgotten at admission", ARRIVALS, "salt=sequence.salt,\n", "\n"),
    Mutant("max_tokens is not enforced", SCHEDULER, "if finished or", "if finished and"),
    Mutant("nor in plain steps", SCHEDULER, "if is_last or", "if is_last and"),
    Mutant(
        "plain steps go on with aborted ones",
        SCHEDULER,
        "if table is None:  # aborted",
        "if not sequence.tokens:  # aborted",
    ),
    Mutant(
        "full pages of plain steps are not published", SCHEDULER, "if stop % page_size and", "if stop and"
    ),
    Mutant("plain steps take void rows", SCHEDULER, "if any(void) or any(more):", "if any(more):"),
    Mutant(
        "who has failed goes on in plain steps",
        SCHEDULER,
        "                ended.append(sequence)\n                continue\n            known",
        "                continue\n            known",
    ),
    Mutant(
        "steps with parallel samples are plain",
        SCHEDULER,
        "= tuple(sequence.parallel_samples), False",
        "= tuple(sequence.parallel_samples), not sequence.drafts",
    ),
    Mutant(
        "failed work is published",
        SCHEDULER,
        "                ended.append(sequence)\n                continue\n            tokens =",
        "                commit_pages(table, sequence.tokens, stop)\n"
        "                ended.append(sequence)\n                continue\n            tokens =",
    ),
    Mutant(
        "aborted work is committed",
        SCHEDULER,
        "if void or table is None:",
        "if void:",
    ),
    Mutant(
        "copies are carried out twice",
        SCHEDULER,
        "copies, self._queues.copies = tuple(self._queues.copies), []",
        "copies = tuple(self._queues.copies)",
    ),
    Mutant(
        "copies are dropped",
        SCHEDULER,
        "SchedulerOutput(tuple(work), copies,",
        "SchedulerOutput(tuple(work), (),",
    ),
    Mutant(
        "an aborted member's failure is not noticed",
        SCHEDULER,
        "all(result.token is not None for result in results)",
        "all(result.token is not None for _, result in drawn)",
    ),
    Mutant(
        "a failed group keeps its pages",
        SCHEDULER,
        "kv_valid = all(result.token is not None for result in results)",
        "kv_valid = True",
    ),
    Mutant("parallel samples are served twice", SCHEDULER, "        parent.parallel_samples = []\n", ""),
    Mutant(
        "the check at submission counts the prompt only",
        SCHEDULER,
        "need = member.max_length",
        "need = member.num_prompt",
    ),
    Mutant(
        "sampled() forgets parallel samples",
        TYPES,
        "for sequence in (item.sequence, *item.parallel_samples)",
        "for sequence in (item.sequence,)",
    ),
    Mutant(
        "drafts do not spend the budget",
        "scheduler/drafts.py",
        "        budget.spend_drafts(sequence, granted[-1])\n",
        "",
    ),
    Mutant(
        "drafts go beyond max_tokens",
        "scheduler/drafts.py",
        "min(len(sequence.drafts), _tokens_left(sequence) - 1, share)",
        "min(len(sequence.drafts), share)",
    ),
    Mutant("wrong drafts are committed", SCHEDULER, "stop += len(more)", "stop += len(drafts)"),
    Mutant("wrong drafts keep their pages", SCHEDULER, "if drafts and len(more) < len(drafts):", "if False:"),
    Mutant(
        "preempted sequences keep their pages",
        SCHEDULER,
        "            self._release(victim)\n",
        "",
    ),
    Mutant(
        "preempted sequences queue at the end",
        QUEUES,
        "        self._put_back(victim)",
        "        victim.status = Status.WAITING\n        self.enqueue(victim)",
    ),
    Mutant(
        "ended sequences keep their pages",
        SCHEDULER,
        "            for sequence in ended:\n                self._release(sequence)\n",
        "",
    ),
    Mutant(
        "abort keeps the pages",
        SCHEDULER,
        "self._queues.abort(sequence)\n            self._release(sequence)",
        "self._queues.abort(sequence)",
    ),
    Mutant(
        "abort of a parent takes its parallel samples along",
        QUEUES,
        "elif sequence.parallel_samples:",
        "elif False:",
    ),
    Mutant(
        "a successor forgets the other parallel samples",
        QUEUES,
        "successor, *successor.parallel_samples = sequence.parallel_samples",
        "successor = sequence.parallel_samples[0]",
    ),
    Mutant(
        "a successor does not get the pages",
        QUEUES,
        "successor.table, parent.table = parent.table, None",
        "pass",
    ),
    Mutant(
        "passes of another time count",
        QUEUES,
        "        sequence.num_overtaken = 0\n",
        "",
    ),
    Mutant("forks exceed max_running", QUEUES, "len(self.running) == self.max_running or not", "not"),
    Mutant("copies are not asked for", QUEUES, "self.copies += fork.copies", "pass"),
    Mutant(
        "unwanted copies stay",
        SCHEDULER,
        "if (copy.group, copy.target) in held]",
        "if copy is None]",
    ),
    Mutant(
        "tenants that come back are not lifted",
        FAIR,
        "service[tenant] = max(service.get(tenant, 0.0), level - self.head_start)",
        "service[tenant] = service.get(tenant, 0.0)",
    ),
    Mutant(
        "cached tokens are charged",
        FAIR,
        "sequence.num_charged = max(sequence.num_charged, sequence.num_written)",
        "pass",
    ),
    Mutant(
        "outputs are free",
        FAIR,
        "cost = (stop - start - prompt) * self._cost(self._output_cost, tenant)",
        "cost = 0.0",
    ),
    Mutant(
        "samples pay for the prompt again",
        FAIR,
        "sample.num_charged = sample.num_prompt  #",
        "pass  #",
    ),
    Mutant(
        "equal prompts are computed at once",
        ARRIVALS,
        "if find and _next_digest(table) in filling:",
        "if table is None:",
    ),
    Mutant(
        "another tenant's long prompt holds others up",
        "scheduler/waiting/lanes.py",
        "running.priority < sequence.priority or _are_equals(running, sequence)",
        "running.priority <= sequence.priority",
    ),
    Mutant(
        "a latency target lets everybody in",
        ARRIVALS,
        "if self._resumption.holds_up(sequence) or not self._targets.has_time(sequence):",
        "if self._resumption.holds_up(sequence):",
    ),
    Mutant(
        "who is late gives way to nobody",
        "scheduler/waiting/age_order.py",
        "return 3 if sequence in self.late else 2",
        "return 2",
    ),
    Mutant(
        "who is late waits for ever",
        "scheduler/waiting/age_order.py",
        "oldest.num_overtaken += 1",
        "oldest.num_overtaken = 0",
    ),
    # a step that is planned before the one before it is committed
    Mutant(
        "a sequence that has ended is planned ahead",
        PLAN_AHEAD,
        "if start + 1 >= sequence.max_length:",
        "if start + 1 > sequence.max_length:",
    ),
    Mutant(
        "rows of a wrong token are committed",
        SCHEDULER,
        "            index += 1\n            if void or",
        "            index += 1\n            if void and table:\n"
        "                commit_pages(table, [*sequence.tokens, 0], stop)\n            if void or",
    ),
    Mutant(
        "a step ahead takes the tokens of others",
        PLAN_AHEAD,
        "sources.append(index)",
        "sources.append(len(sources))",
    ),
    Mutant("a step ahead has no room", PLAN_AHEAD, "if not blocks.reserve(table, start + 1):", "if False:"),
)
