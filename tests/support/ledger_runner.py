"""A deterministic model for tests, which checks what each step reads.

``LedgerRunner`` stores for each slot the prefix that its K/V depends on, and checks attended positions.
Its next token depends on the whole prefix, so cache errors change tokens or fail an assertion."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.block_manager import FullAttention, KVGroupSpec
from octavo.engine.api.engine_info import EngineInfo
from octavo.engine.api.outputs import TokenLogprob
from octavo.engine.executor.base import Adapters, Images, Pending, RunOutput
from octavo.engine.executor.batch import Batch
from octavo.engine.executor.sampling.sampler import LATE, Sampled, SampleState
from octavo.engine.kv_store.page_runs import PageLayoutKey, StateKind
from octavo.engine.structured_output.constraint import ConstraintFailed
from octavo.engine.structured_output.mask_threads import MaskLate
from octavo.kernels.interface import LayerSpec, PoolSpec
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.page_bytes import PageBytes

EOS = 256
ALPHABET = b"abc \n"  # output characters: few, so that stop strings occur


ENTRY = struct.Struct("<ii8s")
STATE = struct.Struct("<q8s")


@dataclass(frozen=True, slots=True)
class Entry:
    """Contents of a slot: a token and the digest of the prefix up to it."""

    position: int
    token: int
    digest: bytes


@dataclass(eq=False, slots=True)
class LedgerStep:
    runner: LedgerRunner
    number: int
    batch: Batch
    states: list[SampleState]
    feeds: bool
    before: LedgerStep | None = None
    output: RunOutput | None = None

    def resolve(self) -> RunOutput:
        if self.output is None:
            self.output = self.runner.resolve(self)
        return self.output


class LedgerRunner:
    """A ``ModelRunner`` over a ledger.

    ends_every:  one of about this many tokens ends the text (0: none)
    poison:      prompt token with K/V that is not finite
    before_step: called on the engine's thread before every step
    verify:      check every attended position (False: only the previous one, for timing)
    feeds:       steps are computed when they are resolved; later steps may be submitted before that."""

    head = None
    adapters: Adapters | None = None
    images: Images | None = None

    def __init__(
        self,
        info: EngineInfo,
        *,
        ends_every: int = 0,
        poison: int | None = None,
        before_step: Callable[[], None] | None = None,
        verify: bool = True,
        feeds: bool = False,
    ) -> None:
        self.info = info
        self.feeds = feeds
        self.calls: list[tuple[str, int]] = []
        self._num_submitted = 0
        self._in_flight: list[LedgerStep] = []
        self.num_steps = 0
        self.closed = False
        self._ends_every = ends_every
        self._poison = poison
        self._before_step = before_step
        self._verify = verify
        self._thread = threading.get_ident()
        self._groups = info.groups or (FullAttention(num_pages=info.num_pages),)
        self._ledgers: list[list[Entry | None]] = [
            [None] * (group.num_pages * info.page_size) for group in self._groups
        ]
        num_slots = 0 if info.states is None else info.states.num_slots
        self._states = [(0, b"")] * num_slots

    def submit(self, batch: Batch, states: Sequence[SampleState], after: Pending | None = None) -> Pending:
        assert (batch.sources is not None) == (after is not None)
        assert self._in_flight == ([] if after is None else [after]), "follows another step than the last one"
        step = LedgerStep(self, self._num_submitted, batch, list(states), self.feeds)
        self._num_submitted += 1
        self.calls.append(("submit", step.number))
        self._in_flight.append(step)
        if after is not None:
            assert after.feeds
            assert isinstance(after, LedgerStep)
            step.before = after
        if not self.feeds:
            step.resolve()
        return step

    def resolve(self, step: LedgerStep) -> RunOutput:
        assert self._in_flight.pop(0) is step, "steps are resolved out of turn"
        self.calls.append(("resolve", step.number))
        batch = step.batch
        if batch.sources is not None:
            assert step.before is not None
            assert not batch.token_ids.any()
            assert step.before.output is not None
            drawn = [sampled.token or 0 for sampled in step.before.output.samples]
            batch = batch._replace(token_ids=np.array([drawn[i] for i in batch.sources], np.int32))
        step.before = None
        return self._compute(batch, step.states)

    def run(self, batch: Batch, states: Sequence[SampleState]) -> RunOutput:
        return self.submit(batch, states).resolve()

    def _compute(self, batch: Batch, states: Sequence[SampleState]) -> RunOutput:
        assert threading.get_ident() == self._thread, "a step ran outside the thread that made the runner"
        assert len(states) == len(batch.sample_rows)
        if self._before_step is not None:
            self._before_step()
        self.num_steps += 1
        assert len(batch.attention.groups) == len(self._groups)
        for index, group in enumerate(self._groups):
            batch.attention.select((index,)).check(group.num_pages)
        size = self.info.page_size
        for copy in batch.copies:
            if copy.group == len(self._groups):
                self._states[copy.target] = self._states[copy.source]
                continue
            ledger = self._ledgers[copy.group]
            for offset in range(size):
                ledger[copy.target * size + offset] = ledger[copy.source * size + offset]
        digests = self._write(batch.token_ids.tolist(), batch.attention)
        if self._states:
            self._advance(digests, batch.token_ids.tolist(), batch.attention)
        failed = [row for row, token in enumerate(batch.token_ids.tolist()) if token == self._poison]
        samples = [
            self._sample(batch.attention, row, digests[row], state, failed)
            for row, state in zip(batch.sample_rows.tolist(), states, strict=True)
        ]
        targets = [] if batch.scored is None else batch.scored.targets.tolist()
        scores = tuple(TokenLogprob(target, -0.25) for target in targets)
        hidden = None
        if batch.hidden is not None:
            hidden = np.array([list(digests[row][:2]) for row in batch.hidden.tolist()], np.float32)
        return RunOutput(tuple(samples), tuple(failed), scores, hidden)

    @property
    def page_layout_key(self) -> PageLayoutKey:
        """16 bytes per position: the position, its token and the digest."""
        states = (StateKind(self.info.page_size, (("digest", (8,), "uint8"),), STATE.size),)
        return PageLayoutKey(
            "ledger", tuple(map(self._spec, self._groups)), states=states if self._states else ()
        )

    def _spec(self, group: KVGroupSpec) -> PoolSpec:
        layer = LayerSpec(num_kv_heads=1, head_dim=4, value_dim=4, window=group.window, keep=group.keep)
        return PoolSpec(
            layers=(layer,),
            num_pages=group.num_pages,
            page_size=self.info.page_size,
            k_format="bf16",
            v_format="bf16",
        )

    def read_pages(self, pages: Sequence[int], group: int) -> PageBytes:
        if group == len(self._groups):
            data = b"".join(STATE.pack(*self._states[slot]) for slot in pages)
            return np.frombuffer(data, np.uint8).reshape(len(pages), STATE.size)
        size, ledger = self.info.page_size, self._ledgers[group]
        data = b""
        for page in pages:
            for entry in ledger[page * size : (page + 1) * size]:
                assert entry is not None, f"page {page} is read before it is full"
                data += ENTRY.pack(entry.position, entry.token, entry.digest)
        return np.frombuffer(data, np.uint8).reshape(len(pages), size * ENTRY.size)

    def write_pages(self, pages: Sequence[int], data: PageBytes, group: int) -> None:
        assert not self._in_flight, "pages are written under a step"
        if group == len(self._groups):
            for slot, row in zip(pages, data, strict=True):
                self._states[slot] = STATE.unpack(row.tobytes())
            return
        size, ledger = self.info.page_size, self._ledgers[group]
        for page, row in zip(pages, data, strict=True):
            entries = [Entry(*fields) for fields in ENTRY.iter_unpack(row.tobytes())]
            ledger[page * size : (page + 1) * size] = entries

    def close(self) -> None:
        self.closed = True

    def _write(self, token_ids: list[int], attention: AttentionMetadata) -> list[bytes]:
        digests: list[bytes] = []
        for number, ledger in enumerate(self._ledgers):
            digests = self._write_group(token_ids, attention.select((number,)), ledger)
        if self._verify:
            for number, part in enumerate(attention.groups):
                for b, pages in enumerate(part.page_table.tolist()):
                    first = int(attention.positions[attention.q_start[b]])
                    self._check(number, pages, first, int(attention.kv_len[b]))
        return digests

    def _advance(self, digests: list[bytes], token_ids: list[int], attention: AttentionMetadata) -> None:
        assert attention.states is not None
        q_start, positions = attention.q_start.tolist(), attention.positions.tolist()
        snapshots = attention.states.snapshots.tolist()
        for b, slot in enumerate(attention.states.slots.tolist()):
            first, stop = q_start[b], q_start[b + 1]
            state = self._states[slot] if positions[first] else (0, b"")
            for row in range(first, stop):
                assert state[0] == positions[row], f"the state after {state[0]} tokens meets {positions[row]}"
                state = (state[0] + 1, chain(state[1], token_ids[row]))
                assert state[1] == digests[row], "the state is another sequence's"
                for sequence, position, target in snapshots:
                    if (sequence, position) == (b, state[0]):
                        self._states[target] = state
            self._states[slot] = state

    def _write_group(
        self, token_ids: list[int], attention: AttentionMetadata, ledger: list[Entry | None]
    ) -> list[bytes]:
        size, q_start = self.info.page_size, attention.q_start.tolist()
        group = attention.only_group()
        positions, slots = attention.positions.tolist(), group.slots.tolist()
        digests: list[bytes] = []
        for b, pages in enumerate(group.page_table.tolist()):
            for row in range(q_start[b], q_start[b + 1]):
                position = positions[row]
                before = self._at(ledger, pages, position - 1) if position else None
                assert (before is None) == (position == 0), f"nothing is written at {position - 1}"
                assert slots[row] == pages[position // size] * size + position % size
                digest = chain(before.digest if before else b"", token_ids[row])
                ledger[slots[row]] = Entry(position, token_ids[row], digest)
                digests.append(digest)
        return digests

    def _check(self, number: int, pages: list[int], first_query: int, length: int) -> None:
        group, digest = self._groups[number], b""
        for position in range(length):
            hidden = group.window is not None and group.keep <= position <= first_query - group.window
            if hidden:
                digest = b""
                continue
            entry = self._at(self._ledgers[number], pages, position)
            assert entry is not None, f"position {position} of {length} is read before it is written"
            assert entry.position == position, f"position {position} holds {entry.position}"
            digest = chain(digest, entry.token) if digest or not position else entry.digest
            assert entry.digest == digest, f"position {position} holds another sequence's K/V"

    def _at(self, ledger: list[Entry | None], pages: list[int], position: int) -> Entry | None:
        size = self.info.page_size
        return ledger[pages[position // size] * size + position % size]

    def _sample(
        self, attention: AttentionMetadata, row: int, digest: bytes, state: SampleState, failed: list[int]
    ) -> Sampled:
        if failed:
            sequence = next(b for b, end in enumerate(attention.q_start[1:].tolist()) if row < end)
            first, end = attention.q_start[sequence : sequence + 2].tolist()
            if any(first <= bad < end for bad in failed):
                return Sampled(None, error="the ledger was poisoned")
        greedy = state.params.temperature == 0
        token = next_token(digest, None if greedy else (state.seed, state.num_generated), self._ends_every)
        if state.constraint is not None:
            try:
                token = _allowed_token(state, token)
            except MaskLate:
                return LATE
            except ConstraintFailed as error:
                return Sampled(None, error=str(error))
        return Sampled(token, None if state.params.logprobs is None else TokenLogprob(token, -0.5))


def chain(parent: bytes, token: int) -> bytes:
    return hashlib.blake2b(parent + token.to_bytes(4, "little"), digest_size=8).digest()


def next_token(digest: bytes, draw: tuple[int, int] | None, ends_every: int) -> int:
    """Return the next token after a prefix; ``sample``: (seed, number of earlier tokens)."""
    number = int.from_bytes(hashlib.blake2b(digest + repr(draw).encode(), digest_size=8).digest(), "little")
    if ends_every and number % ends_every == 0:
        return EOS
    return ALPHABET[(number >> 16) % len(ALPHABET)]


def _allowed_token(state: SampleState, token: int) -> int:
    mask = state.allowed()
    assert mask is not None
    if mask[token]:
        return token
    ids = np.flatnonzero(mask)
    return int(ids[token % len(ids)])
