from __future__ import annotations

from collections import Counter, abc, deque
from collections.abc import Callable
from itertools import chain

from octavo.block_manager import BlockManager

from .admitter import Admitter
from .budget import TokenBudget
from .connector import KVConnector
from .drafts import drop_rejected, plan_drafts
from .latency_target import LatencyTargets
from .limits import Limits, SequenceTooLong
from .pages import Pages
from .preemption import lost_work
from .prompt_pace import Deadlines, PromptPace
from .resources import Resource, Resources
from .resumption import LoadReservation, Resumption
from .sequence_queues import SequenceQueues
from .step_cost import decode_shape, shape_of
from .step_plan import StepPlan, next_tokens
from .types import SampleResult, ScheduledChunk, SchedulerOutput, Sequence, Status, StepShape
from .waiting import WaitingQueue


class Scheduler:
    """Plans steps: one token for every decoding sequence, then prompt chunks, then new sequences.

    Prefill and decode are not separate phases: a sequence is computed until ``num_written`` has caught up
    with ``len(tokens)``. Waiting sequences are admitted in the order of ``waiting`` until the token budget is
    spent. Drafts get the rest.

    When pages run out, a younger sequence is preempted: it releases all pages and recomputes evicted ones
    later. So the oldest sequence always makes progress.

    drafts   tokens to verify in the next step, by decoding sequence

    ``plan`` and ``commit`` alternate. ``plan_ahead`` may plan one more step between them. ``add`` and
    ``abort`` may be called at any time, but build the batch of a planned step before aborting its sequences.
    """

    def __init__(
        self,
        blocks: BlockManager,
        limits: Limits,
        connector: KVConnector | None = None,
        *,
        waiting: WaitingQueue | None = None,
        resources: abc.Sequence[Resource] = (),
    ) -> None:
        if limits.max_step_tokens > blocks.max_chunk and any(group.window for group in blocks.groups):
            raise ValueError(
                f"max_step_tokens must be at most the block manager's max_chunk of {blocks.max_chunk}, got "
                f"{limits.max_step_tokens}: windows reserve space for max_chunk tokens; raise max_chunk or "
                "lower max_step_tokens"
            )
        self.blocks = blocks
        self.limits = limits
        self.num_preemptions = 0
        self.paused: abc.Set[Sequence] = frozenset()  # running sequences that get no token in the next steps
        self.drafts: dict[Sequence, tuple[int, ...]] = {}
        self.prompt_pace = PromptPace()
        self._connector = connector or KVConnector()
        self._has_deadlines = False
        self._deadlines = Deadlines(blocks)
        queue = WaitingQueue() if waiting is None else waiting
        self._queues = SequenceQueues(limits.max_running, queue)
        self._resumption = Resumption(self._connector, self._queues, self.prompt_pace)
        self._targets = LatencyTargets(limits, self._queues)
        self._pages = Pages(blocks, self._queues)
        self._resources = Resources(
            (LoadReservation(self._resumption), self._targets, *resources, self._pages, self._resumption)
        )
        self._admitter = Admitter(blocks, limits, self._queues, self._resources, self._pages)
        self._planned: deque[SchedulerOutput] = deque()

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for admission, pages or images, without parallel samples."""
        return len(self._queues.waiting) + len(self._queues.loading)

    @property
    def has_work(self) -> bool:
        """Whether ``plan`` could return a step; False while all sequences wait for loaded pages."""
        if self._queues.running or self._connector.has_updates:
            return True
        waits = bool(self._queues.waiting) and not self._resumption.all_must_wait()
        return waits or self._resources.is_pending

    def tenant_loads(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of running and of waiting sequences by tenant."""
        queues = self._queues
        running = Counter(sequence.tenant for sequence in queues.running)
        waiting = Counter(sequence.tenant for sequence in chain(queues.waiting, queues.loading))
        return {tenant: (running[tenant], waiting[tenant]) for tenant in {**running, **waiting}}

    def on_update(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, from any thread, when the connector has news."""
        self._connector.on_update(wake)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence and its parallel samples. Raises SequenceTooLong if one could never fit."""
        self.check_fits(sequence)
        for member in (sequence, *sequence.parallel_samples):
            assert member.status is Status.WAITING, "a sequence can be added only once"
            assert member.tokens == sequence.tokens, "parallel samples share one prompt"
            assert member.salt == sequence.salt, "parallel samples share one salt"
            assert member.priority == sequence.priority, "parallel samples share one priority"
            assert member.tenant == sequence.tenant, "parallel samples share one tenant"
            self._has_deadlines = self._has_deadlines or member.latency.first_token_by is not None
            self._targets.add(member)
        if not sequence.skip_prefix_cache and self._connector.start_load(sequence):
            self._queues.load(sequence)
        else:
            self._queues.enqueue(sequence)

    def check_fits(self, sequence: Sequence) -> None:
        """Raise SequenceTooLong if a sequence or one of its parallel samples could never fit."""
        for member in (sequence, *sequence.parallel_samples):
            need = member.max_length
            if need > (capacity := self.blocks.capacity):
                raise SequenceTooLong(
                    f"{member.sequence_id} needs {need} tokens of KV ({member.num_prompt} of prompt, up to "
                    f"{need - member.num_prompt} generated), but the pool holds {capacity}; shorten "
                    "the prompt, lower max_tokens or give the pool more memory"
                )

    def abort(self, sequence: Sequence) -> None:
        """End a sequence now and free its pages; its parallel samples continue."""
        if sequence.status is Status.WAITING_FOR_PAGES:
            self._connector.cancel_load(sequence)
            self._stop_loading(sequence)
        elif sequence.status is Status.WAITING_FOR_MEDIA:
            self.retry(sequence)
        if sequence.status is not Status.FINISHED:
            self._pages.clear_refused()
            self._queues.abort(sequence)
            self._release(sequence)

    def retry(self, sequence: Sequence) -> None:
        """Queue a sequence whose image is encoded now, so that ``plan`` tries to admit it again."""
        self._queues.resume(sequence)

    def spare_time(self) -> float | None:
        """Return the seconds that other work may take before the next step.

        Prompts that wait or run keep half of the time. None without a latency target or decoding sequences.
        """
        latency, running = self._targets.latency, [s for s in self._queues.running if s not in self.paused]
        decoding = [each for each in running if each.backlog == 1]
        if latency is None or not decoding:
            return None
        shape = StepShape(len(decoding), 0, sum(len(each.tokens) for each in decoding), 0)
        time = latency.limit(shape, self._targets.tightest(decoding))
        if time is None:
            return None
        has_prompts = self._queues.can_admit or len(decoding) < len(running)
        return time.left_s / 2 if has_prompts else time.left_s

    def plan(self, now: float | None = None, *, spent_s: float = 0.0) -> SchedulerOutput | None:
        """Decide the next step and reserve its pages; None if there is nothing to do.

        now       current time in seconds, to compare with first-token deadlines (None: no deadlines)
        spent_s   seconds that other work has taken since the last step, see ``spare_time``
        """
        assert not self._planned, "the last step has not been committed"
        for sequence in self._connector.poll():
            self._stop_loading(sequence)
        if self._has_deadlines and now is not None:
            waiting = self._queues.waiting
            waiting.set_late(self._deadlines.late(waiting, now, self.prompt_pace.token_s))
        plan = StepPlan()
        if self._queues.shares.has_several_tenants:
            self._preempt_above_share(plan)
        self._plan_decodes(plan)
        if plan.chunks or not plan.is_decode_only or self._queues.can_admit:
            self._open_budget(plan, spent_s)
            held_back = self._plan_chunks(plan, self._queues.waiting.prefill_order(plan.chunks))
            self._plan_admissions(plan)
            self._plan_chunks(plan, held_back, may_admit=False)
            self._plan_drafts(plan)
        return self._complete(plan)

    @property
    def is_blocked(self) -> bool:
        """Whether sequences wait for loaded pages, so that ``plan`` may return None."""
        return bool(self.paused) or self._resources.is_pending

    def stuck(self) -> tuple[Sequence, ...]:
        """Return the sequences that can never make progress; call it right after ``plan`` returned None.

        There are none unless the scheduler has a bug. The caller aborts them.
        """
        if self.is_blocked:
            return ()
        if self._queues.running or (self._queues.waiting and not self._resumption.all_must_wait()):
            return (*self._queues.running, *self._queues.waiting)
        return ()

    def plan_ahead(self) -> SchedulerOutput | None:
        """Plan the step after an uncommitted step: the next token of each sequence, and nothing else.

        Return None if results of the uncommitted step may change the plan.
        """
        (before,) = self._planned
        if (
            self._connector.saves_steps
            or self._connector.has_updates
            or self.blocks.states is not None
            or self.blocks.has_copies
            or self._admitter.may_admit()
            or self._admitter.victims()
        ):
            return None
        step = next_tokens(before, self._queues.running, self.blocks, self._targets.latency)
        if step is not None:
            self._planned.append(step)
        return step

    def observe(self, step: SchedulerOutput, seconds: float) -> None:
        self.prompt_pace.observe(step, seconds)
        if (latency := self._targets.latency) is not None:
            latency.observe(step.shape or shape_of(step.work), seconds)

    def commit(self, step: SchedulerOutput, results: abc.Sequence[SampleResult]) -> None:
        """Record a computed step: append tokens, publish full pages, end finished sequences.

        results   one result per sequence, in the order of ``step.sampled()``
        """
        oldest = self._planned.popleft() if self._planned else None
        assert step is oldest, "this step is not the oldest step that waits for commit"
        if step.copies:
            self.blocks.copied(step.copies)
        groups: list[tuple[ScheduledChunk, abc.Sequence[SampleResult]]] = []
        ended = self._append_tokens(step.work, results) if step.decode_only else None
        if ended is None:
            ended, groups = self._append_results(step.work, results)
        if ended:
            self._pages.clear_refused()
            for sequence in ended:
                self._release(sequence)
            self._queues.end(ended)
        for item, sampled in groups:
            self._commit_group(item, sampled)
        self._queues.waiting.on_computed(step.work)
        if not self._planned:
            self._queues.successors.clear()
        self._connector.save(step)

    def close(self) -> None:
        """Let the connector store its queued pages within a bounded time. No step may follow."""
        self._connector.close()

    def _stop_loading(self, sequence: Sequence) -> None:
        if not self._resumption.end(sequence):
            self._queues.enqueue(sequence)

    def _preempt_above_share(self, plan: StepPlan) -> None:
        if self._queues.shares.is_uneven:
            for victim in self._admitter.victims():
                self._preempt(victim, plan, for_pages=False)
                self._admitter.note_preempted(victim)

    def _plan_decodes(self, plan: StepPlan) -> None:
        new, chunk = tuple.__new__, ScheduledChunk
        plan.is_decode_only, drafts = True, self.drafts
        append = plan.work.append
        running = self._queues.running
        for sequence in [s for s in running if s not in self.paused] if self.paused else tuple(running):
            table = sequence.table
            if table is None:
                continue
            start, stop = table.num_written, len(sequence.tokens)
            if stop - start != 1:
                plan.chunks.append(sequence)
            elif stop <= table.capacity or self._reserve_or_preempt(sequence, stop, plan):
                samples: tuple[Sequence, ...] = ()
                if sequence in drafts or sequence.parallel_samples or start < sequence.num_prompt:
                    samples, plan.is_decode_only = tuple(sequence.parallel_samples), False
                append(new(chunk, (sequence, start, stop, True, samples, ())))
        plan.num_decodes = len(plan.work)
        if self._targets.latency is not None:
            plan.shape = decode_shape(plan.work)

    def _open_budget(self, plan: StepPlan, spent_s: float) -> None:
        time, latency = None, self._targets.latency
        if latency is not None and plan.shape is not None:
            tightest = self._targets.tightest(item.sequence for item in plan.work)
            time = latency.limit(plan.shape, tightest, spent_s)
        left = self.limits.max_step_tokens - len(plan.work)
        plan.budget = TokenBudget(left, self.limits, self.blocks, self._resources, time=time)

    def _plan_chunks(
        self, plan: StepPlan, chunks: list[Sequence], *, may_admit: bool = True
    ) -> list[Sequence]:
        waiting, budget, held_back = self._queues.waiting, plan.budget, []
        may_admit = may_admit and bool(chunks) and not plan.preempted and self._admitter.may_admit()
        for index, sequence in enumerate(chunks):
            if not budget.left:
                break
            if sequence.status is not Status.RUNNING:
                continue
            wanted = sequence.backlog
            competing = chain(chunks[index + 1 :], waiting.waiting_prompts(sequence) if may_admit else ())
            first = tuple(waiting.served_less(sequence)) if may_admit else ()
            tokens = budget.grant(sequence, wanted, competing, first)
            next_one = first[0] if first and budget.num_missing(first[0]) <= budget.left else None
            if not tokens or (
                self.limits.is_long_prompt(sequence.num_prompt)
                and waiting.ends_step(sequence, plan.work, next_one)
            ):
                held_back.append(sequence)
            elif self._reserve_or_preempt(sequence, sequence.num_written + tokens, plan):
                waiting.on_planned(plan.add_chunk(sequence, tokens, wanted))
        return held_back

    def _plan_admissions(self, plan: StepPlan) -> None:
        if not plan.preempted and plan.budget.left and self._queues.waiting:
            self._admitter.plan(plan)

    def _plan_drafts(self, plan: StepPlan) -> None:
        if (
            self.drafts
            and plan.budget.left
            and not plan.preempted
            and len(plan.work) >= len(self._queues.running)
        ):
            plan.has_drafts = plan_drafts(plan.work, self.drafts, plan.budget, self.blocks)

    def _complete(self, plan: StepPlan) -> SchedulerOutput | None:
        work = plan.work
        if not work:
            return None
        if self.blocks.takes_snapshots:
            for item in work:
                sequence, drafts = item.sequence, len(item.drafts)
                assert sequence.table is not None
                self.blocks.plan_snapshots(
                    sequence.table, item.start, item.end, num_known=len(sequence.tokens) + drafts
                )
        only_decodes = len(work) == plan.num_decodes and not plan.has_drafts
        shape, predicted_s = plan.shape if only_decodes else None, None
        if (latency := self._targets.latency) is not None:
            shape = shape or shape_of(work)
            predicted_s = latency.predict(shape)
        done = tuple(plan.preempted), tuple(plan.lookups)
        decode_only = only_decodes and plan.is_decode_only
        step = SchedulerOutput(
            tuple(work), self.blocks.take_copies(), *done, predicted_s, shape, decode_only=decode_only
        )
        self._planned.append(step)
        return step

    def _reserve_or_preempt(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        table = sequence.table
        assert table is not None
        while not self.blocks.reserve(table, num_tokens):
            planned = {item.sequence for item in plan.work}
            running = self._queues.running
            younger = [s for s in running[running.index(sequence) + 1 :] if s not in planned]
            younger = self._within_shares(sequence, younger)
            if not younger:
                return False
            victim = self._queues.waiting.victim(younger, lambda each: lost_work(each, self.blocks))
            self._preempt(victim, plan)
            self.num_preemptions += 1
        return True

    def _within_shares(self, sequence: Sequence, younger: list[Sequence]) -> list[Sequence]:
        shares, has_precedence = self._queues.shares, self._queues.waiting.has_precedence
        if not shares.are_contended or not shares.is_above(sequence.tenant):
            return younger
        found = [
            each for each in younger if shares.is_above(each.tenant) or not has_precedence(each, sequence)
        ]
        return found or (younger if sequence is self._queues.running[0] else [])

    def _preempt(self, victim: Sequence, plan: StepPlan, *, for_pages: bool = True) -> None:
        self._resumption.on_preemption(victim)
        self._release(victim)
        self._queues.preempt(victim, for_pages=for_pages)
        plan.preempted.append(victim)

    def _append_tokens(
        self, work: abc.Sequence[ScheduledChunk], results: abc.Sequence[SampleResult]
    ) -> list[Sequence] | None:
        assert len(results) == len(work), f"{len(results)} results for {len(work)} samples"
        tokens, finished, accepted, discarded = zip(*results)  # noqa: B905  # equal lengths; strict doubles the time
        if any(discarded) or any(accepted):
            return None
        blocks = self.blocks
        commit_pages, page_size, has_states = blocks.commit, blocks.page_size, blocks.states is not None
        ended: list[Sequence] = []
        for item, token, is_last in zip(work, tokens, finished):  # noqa: B905  # see above
            sequence = item[0]
            table = sequence.table
            if table is None:
                continue
            if token is None:
                ended.append(sequence)
                continue
            known = sequence.tokens
            known.append(token)
            stop = item[2]
            if stop % page_size and not has_states:
                table.num_written = stop
            else:
                commit_pages(table, known, stop)
            if is_last or stop + 1 >= sequence.max_length:
                ended.append(sequence)
        return ended

    def _append_results(
        self, work: abc.Sequence[ScheduledChunk], results: abc.Sequence[SampleResult]
    ) -> tuple[list[Sequence], list[tuple[ScheduledChunk, abc.Sequence[SampleResult]]]]:
        commit_pages, successors = self.blocks.commit, self._queues.successors
        ended: list[Sequence] = []
        groups: list[tuple[ScheduledChunk, abc.Sequence[SampleResult]]] = []
        index = 0
        for item in work:
            sequence, _, stop, samples, parallel_samples, drafts = item
            table = sequence.table
            if parallel_samples:
                first, index = index, index + samples + len(parallel_samples)
                groups.append((item, results[first:index]))
                continue
            if not samples:
                while table is None and sequence in successors:
                    sequence = successors[sequence]
                    table = sequence.table
                if table is not None:
                    commit_pages(table, sequence.tokens, stop)
                continue
            token, finished, accepted, discarded = results[index]
            index += 1
            if discarded or table is None:
                continue
            if token is None:
                ended.append(sequence)
                continue
            tokens = sequence.tokens
            tokens.append(token)
            if accepted:
                tokens += accepted
                stop += len(accepted)
            commit_pages(table, tokens, stop)
            if drafts and len(accepted) < len(drafts):
                drop_rejected(table, self.blocks)
            if finished or len(tokens) >= sequence.max_length:
                ended.append(sequence)
        assert index == len(results), f"{len(results)} results for {index} samples"
        return ended, groups

    def _commit_group(self, item: ScheduledChunk, results: abc.Sequence[SampleResult]) -> None:
        members = zip((item.sequence, *item.parallel_samples), results, strict=True)
        sampled = [(member, result) for member, result in members if member.status is not Status.FINISHED]
        if not sampled:
            return
        parent = sampled[0][0]
        assert parent.table is not None
        parent.parallel_samples = []
        kv_valid = all(result.token is not None for result in results)
        if kv_valid:
            self.blocks.commit(parent.table, parent.tokens, item.stop)
        remaining: list[Sequence] = []
        for member, result in sampled:
            member.history.num_cached = parent.history.num_cached
            if result.token is not None:
                member.tokens.append(result.token)
            if result.token is None or result.finished or len(member.tokens) >= member.max_length:
                member.status = Status.FINISHED
            else:
                remaining.append(member)
        if not remaining or not kv_valid:
            self._release(parent)
        self._queues.fork_samples(parent, remaining, self._resources)

    def _release(self, sequence: Sequence) -> None:
        if sequence.table is not None:
            self._resources.release(sequence)
            self._admitter.without_resource.clear()
