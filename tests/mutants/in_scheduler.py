"""Bugs in who computes what, and who has which pages then."""

from __future__ import annotations

from mutant import bug

MUTANTS = (
    bug(
        "arrivals do not spend the budget",
        "budget.spend(sequence, append_chunk(work, sequence, tokens), wanted)\n        self._queues",
        "append_chunk(work, sequence, tokens)\n        self._queues",
    ),
    bug(
        "chunks do not spend the budget",
        "                budget.spend(sequence, append_chunk(work, sequence, tokens), wanted)",
        "                append_chunk(work, sequence, tokens)",
    ),
    bug(
        "long prompts take everything",
        "max(1, self.left - self._short_demand(sequence.priority, rivals))",
        "self.left",
    ),
    bug(
        "nobody passes a long prompt that waits",
        "                blocked, passed = blocked or sequence, passed + 1\n                continue",
        "                break",
    ),
    bug(
        "prompt chunks stop decodes",
        "elif stop <= table.capacity or self._make_room(sequence, stop, work, preempted):",
        "elif not chunks and self._make_room(sequence, stop, work, preempted):",
    ),
    bug(
        "one sequence too many runs",
        "len(self._queues.running) == self._limits.max_running:\n                break",
        "len(self._queues.running) > self._limits.max_running:\n                break",
    ),
    bug("arrivals come in while others are preempted", "if not preempted and", "if"),
    bug(
        "arrivals get pages for a chunk only",
        "blocks.reserve(table, table.num_written + tokens, ahead=len(sequence.tokens))",
        "blocks.reserve(table, table.num_written + tokens)",
    ),
    bug("a planned sequence may be preempted", "+ 1 :] if s not in planned]", "+ 1 :]]"),
    bug("whoever gave way comes back to any room", "most = (1 << min(times, MAX_CAUTION)) - 1", "most = 0"),
    bug(
        "others' first tokens wait for chunks of long prompts",
        "self._is_short or ends\n        return ends",
        "ends\n        return False",
    ),
    bug("whoever loses most gives way", "min(equals,", "max(equals,"),
    bug("the oldest is preempted", "running[running.index(sequence) + 1 :]", "running"),
    bug("a refused arrival never comes in", "not self._has_more_idle(self._refused[1])", "True"),
    bug(
        "a refused arrival keeps its pages",
        "            blocks.close(table)\n            self._refused = ",
        "            self._refused = ",
    ),
    bug(
        "who waits for a page keeps others",
        "            blocks.close(table)\n            return Admission.SHARES",
        "            return Admission.SHARES",
    ),
    bug("salts are forgotten at admission", "salt=sequence.salt,\n", "\n"),
    bug("max_tokens is not enforced", "if finished or", "if finished and"),
    bug("nor in plain steps", "if is_last or", "if is_last and"),
    bug(
        "plain steps go on with aborted ones",
        "if table is None:  # aborted",
        "if not sequence.tokens:  # aborted",
    ),
    bug("full pages of plain steps are not published", "if stop % page_size and", "if stop and"),
    bug("plain steps take void rows", "if any(void) or any(more):", "if any(more):"),
    bug(
        "who has failed goes on in plain steps",
        "                ended.append(sequence)\n                continue\n            known",
        "                continue\n            known",
    ),
    bug(
        "steps with parallel samples are plain",
        "= tuple(sequence.parallel_samples), False",
        "= tuple(sequence.parallel_samples), not sequence.drafts",
    ),
    bug(
        "failed work is published",
        "                ended.append(sequence)\n                continue\n            tokens =",
        "                commit_pages(table, sequence.tokens, stop)\n"
        "                ended.append(sequence)\n                continue\n            tokens =",
    ),
    bug("aborted work is committed", "if void or table is None:", "if void:"),
    bug(
        "copies are carried out twice",
        "self.waiting = self.waiting, []",
        "self.waiting = self.waiting, self.waiting[:]",
    ),
    bug(
        "copies are dropped",
        "SchedulerOutput(tuple(work), self.blocks.take_copies(),",
        "SchedulerOutput(tuple(work), (),",
    ),
    bug(
        "an aborted member's failure is not noticed",
        "all(result.token is not None for result in results)",
        "all(result.token is not None for _, result in drawn)",
    ),
    bug(
        "a failed group keeps its pages",
        "kv_valid = all(result.token is not None for result in results)",
        "kv_valid = True",
    ),
    bug("parallel samples are served twice", "        parent.parallel_samples = []\n", ""),
    bug(
        "the check at submission counts the prompt only",
        "need = member.max_length",
        "need = member.num_prompt",
    ),
    bug(
        "sampled() forgets parallel samples",
        "for sequence in (item.sequence, *item.parallel_samples)",
        "for sequence in (item.sequence,)",
    ),
    bug("drafts do not spend the budget", "        budget.spend_drafts(sequence, granted[-1])\n", ""),
    bug(
        "drafts go beyond max_tokens",
        "min(len(sequence.drafts), _tokens_left(sequence) - 1, share)",
        "min(len(sequence.drafts), share)",
    ),
    bug("wrong drafts are committed", "stop += len(more)", "stop += len(drafts)"),
    bug("wrong drafts keep their pages", "if drafts and len(more) < len(drafts):", "if False:"),
    bug("preempted sequences keep their pages", "            self._release(victim)\n", ""),
    bug(
        "preempted sequences queue at the end",
        "        self._put_back(victim)",
        "        victim.status = Status.WAITING\n        self.enqueue(victim)",
    ),
    bug(
        "ended sequences keep their pages",
        "            for sequence in ended:\n                self._release(sequence)\n",
        "",
    ),
    bug(
        "abort keeps the pages",
        "self._queues.abort(sequence)\n            self._release(sequence)",
        "self._queues.abort(sequence)",
    ),
    bug(
        "abort of a parent takes its parallel samples along", "elif sequence.parallel_samples:", "elif False:"
    ),
    bug(
        "a successor forgets the other parallel samples",
        "successor, *successor.parallel_samples = sequence.parallel_samples",
        "successor = sequence.parallel_samples[0]",
    ),
    bug("a successor does not get the pages", "successor.table, parent.table = parent.table, None", "pass"),
    bug("passes of another time count", "        sequence.num_overtaken = 0\n", ""),
    bug("forks exceed max_running", "if not num_free or self.shares", "if self.shares"),
    bug(
        "a tenant keeps slots that others claim",
        "        if shares.are_several and shares.is_uneven:\n",
        "        if False:\n",
    ),
    bug(
        "a tenant takes slots that others claim",
        "            if self._leaves_slot(",
        "            if False and (",
    ),
    bug("copies are not asked for", "        self.waiting.append(copy)\n", ""),
    bug("unwanted copies stay", "if self._copies.waiting:", "if False:"),
    bug(
        "tenants that come back are not lifted",
        "service[tenant] = max(service.get(tenant, 0.0), level - self.head_start)",
        "service[tenant] = service.get(tenant, 0.0)",
    ),
    bug(
        "cached tokens are charged",
        "sequence.num_charged = max(sequence.num_charged, sequence.num_written)",
        "pass",
    ),
    bug(
        "outputs are free",
        "cost = (stop - start - prompt) * self._cost(self._output_cost, tenant)",
        "cost = 0.0",
    ),
    bug("samples pay for the prompt again", "sample.num_charged = sample.num_prompt  #", "pass  #"),
    bug(
        "equal prompts are computed at once",
        "if find and _next_digest(table) in filling:",
        "if table is None:",
    ),
    bug(
        "another tenant's long prompt holds others up",
        "running.priority < sequence.priority or _are_equals(running, sequence)",
        "running.priority <= sequence.priority",
    ),
    bug(
        "a latency target lets everybody in",
        "if self._resumption.holds_up(sequence) or not self._targets.has_time(sequence):",
        "if self._resumption.holds_up(sequence):",
    ),
    bug("who is late gives way to nobody", "return 3 if sequence in self.late else 2", "return 2"),
    bug("who is late waits for ever", "oldest.num_overtaken += 1", "oldest.num_overtaken = 0"),
    # a step that is planned before the one before it is committed
    bug(
        "a sequence that has ended is planned ahead",
        "if start + 1 >= sequence.max_length:",
        "if start + 1 > sequence.max_length:",
    ),
    bug(
        "rows of a wrong token are committed",
        "            index += 1\n            if void or",
        "            index += 1\n            if void and table:\n"
        "                commit_pages(table, [*sequence.tokens, 0], stop)\n            if void or",
    ),
    bug("a step ahead takes the tokens of others", "sources.append(index)", "sources.append(len(sources))"),
    bug("a step ahead has no room", "if not blocks.reserve(table, start + 1):", "if False:"),
)
