"""A model that needs no model: deterministic, quick, and strict about who reads what.

``LedgerRunner`` keeps, per slot of the pool, which prefix the K/V there would depend on, and
checks every position that is attended to. Its next token is a function of that prefix (and of
the seed, when sampling), so any mistake in page tables, sharing, preemption or aborts shows as
an assertion or as other tokens than a request gets alone.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.engine.batch import Batch
from octavo.engine.build import assemble
from octavo.engine.chat import ChatTemplate
from octavo.engine.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.info import MemoryBudget, ModelInfo
from octavo.engine.outputs import TokenLogprob
from octavo.engine.runner import RunOutput
from octavo.engine.sampler import Sampled, SampleState
from octavo.engine.stats import Observer, StepRecord
from octavo.engine.store.page_files import PageKind
from octavo.engine.tokenizer import Tokenizer
from octavo.kernels.interface import LayerSpec, PoolSpec
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.page_bytes import PageBytes

EOS = 256
VOCAB_SIZE = 258
ALPHABET = b"abc \n"  # what the fake model says: few letters, so that stop strings occur
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def byte_tokenizer(*, eos_ids: frozenset[int] = frozenset({EOS})) -> Tokenizer:
    """Ids 0 to 255 are bytes, 256 ends a text, 257 is another special token."""
    characters = {byte: character for character, byte in _byte_alphabet().items()}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<pad>"])
    return Tokenizer(backend, eos_ids=eos_ids, chat_template=ChatTemplate(CHAT_TEMPLATE, {}))


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of ByteLevel tokenizers for the 256 bytes (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update((chr(256 + index), byte) for index, byte in enumerate(others))
    return table


def fake_info(config: EngineConfig, *, num_pages: int = 64, max_model_len: int = 4096) -> ModelInfo:
    return ModelInfo(
        name="fake",
        path=Path("fake"),
        architecture="ledger",
        num_layers=1,
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len or max_model_len,
        tier="paged",
        backend="reference",
        backend_reason="a fake",
        threads=1,
        weights="bf16",
        kv_format=str(config.page_formats),
        page_size=config.page_size,
        num_pages=config.num_pages or num_pages,
        memory=MemoryBudget(weights=0, pages=0, workspace=0),
    )


ENTRY = struct.Struct("<ii8s")


@dataclass(frozen=True, slots=True)
class Entry:
    """What one slot holds: a position's token and the digest of the prefix up to it."""

    position: int
    token: int
    digest: bytes


class LedgerRunner:
    """A ModelRunner over a ledger.

    ends_every     about one token in so many is EOS (0: never)
    poison         a prompt token whose K/V is not finite
    before_step    called at the start of every step, on the engine's thread: to block, or to raise
    verify         check every position attended to (False: only the one before, for timing)
    """

    def __init__(
        self,
        info: ModelInfo,
        *,
        ends_every: int = 0,
        poison: int | None = None,
        before_step: Callable[[], None] | None = None,
        verify: bool = True,
    ) -> None:
        self.info = info
        self.num_steps = 0
        self.closed = False
        self._ends_every = ends_every
        self._poison = poison
        self._before_step = before_step
        self._verify = verify
        self._thread = threading.get_ident()
        self._ledger: list[Entry | None] = [None] * (info.num_pages * info.page_size)

    def run(self, batch: Batch, states: Sequence[SampleState]) -> RunOutput:
        assert threading.get_ident() == self._thread, "a step ran outside the thread that made the runner"
        assert len(states) == len(batch.sample_rows)
        if self._before_step is not None:
            self._before_step()
        self.num_steps += 1
        batch.attention.check(self.info.num_pages)
        size = self.info.page_size
        for copy in batch.copies:
            for offset in range(size):
                self._ledger[copy.target * size + offset] = self._ledger[copy.source * size + offset]
        digests = self._write(batch.token_ids.tolist(), batch.attention)
        failed = [row for row, token in enumerate(batch.token_ids.tolist()) if token == self._poison]
        samples = [
            self._sample(batch.attention, row, digests[row], state, failed)
            for row, state in zip(batch.sample_rows.tolist(), states, strict=True)
        ]
        targets = [] if batch.scored is None else batch.scored.targets.tolist()
        scores = tuple(TokenLogprob(target, -0.25) for target in targets)
        return RunOutput(tuple(samples), tuple(failed), scores)

    @property
    def page_kind(self) -> PageKind:
        """16 bytes per position: the position, its token and the digest."""
        layer = LayerSpec(num_kv_heads=1, head_dim=4, value_dim=4)
        spec = PoolSpec(
            layers=(layer,),
            num_pages=self.info.num_pages,
            page_size=self.info.page_size,
            k_format="bf16",
            v_format="bf16",
        )
        return PageKind("ledger", spec)

    def read_pages(self, pages: Sequence[int]) -> PageBytes:
        size = self.info.page_size
        data = b""
        for page in pages:
            for entry in self._ledger[page * size : (page + 1) * size]:
                assert entry is not None, f"page {page} is read before it is full"
                data += ENTRY.pack(entry.position, entry.token, entry.digest)
        return np.frombuffer(data, np.uint8).reshape(len(pages), size * ENTRY.size)

    def write_pages(self, pages: Sequence[int], data: PageBytes) -> None:
        size = self.info.page_size
        for page, row in zip(pages, data, strict=True):
            entries = [Entry(*fields) for fields in ENTRY.iter_unpack(row.tobytes())]
            self._ledger[page * size : (page + 1) * size] = entries

    def close(self) -> None:
        self.closed = True

    def _write(self, token_ids: list[int], attention: AttentionMetadata) -> list[bytes]:
        """Write every row's entry; then check what each sequence would read. Digests per row."""
        size, q_start = self.info.page_size, attention.q_start.tolist()
        positions, slots = attention.positions.tolist(), attention.slots.tolist()
        digests: list[bytes] = []
        for b, pages in enumerate(attention.page_table.tolist()):
            for row in range(q_start[b], q_start[b + 1]):
                position = positions[row]
                before = self._at(pages, position - 1) if position else None
                assert (before is None) == (position == 0), f"nothing is written at {position - 1}"
                assert slots[row] == pages[position // size] * size + position % size
                digest = chain(before.digest if before else b"", token_ids[row])
                self._ledger[slots[row]] = Entry(position, token_ids[row], digest)
                digests.append(digest)
        for pages, length in zip(attention.page_table.tolist(), attention.kv_len.tolist(), strict=True):
            self._check(pages, length if self._verify else 0)
        return digests

    def _check(self, pages: list[int], length: int) -> None:
        digest = b""
        for position in range(length):
            entry = self._at(pages, position)
            assert entry is not None, f"position {position} of {length} is read before it is written"
            digest = chain(digest, entry.token)
            assert entry.position == position, f"position {position} holds {entry.position}"
            assert entry.digest == digest, f"position {position} holds another sequence's K/V"

    def _at(self, pages: list[int], position: int) -> Entry | None:
        size = self.info.page_size
        return self._ledger[pages[position // size] * size + position % size]

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
            token = _allowed_token(state, token)
        return Sampled(token, None if state.params.logprobs is None else TokenLogprob(token, -0.5))


def chain(parent: bytes, token: int) -> bytes:
    return hashlib.blake2b(parent + token.to_bytes(4, "little"), digest_size=8).digest()


def next_token(digest: bytes, draw: tuple[int, int] | None, ends_every: int) -> int:
    """What the fake model says after the prefix with this digest; ``draw`` is (seed, how many before)."""
    number = int.from_bytes(hashlib.blake2b(digest + repr(draw).encode(), digest_size=8).digest(), "little")
    if ends_every and number % ends_every == 0:
        return EOS
    return ALPHABET[(number >> 16) % len(ALPHABET)]


def _allowed_token(state: SampleState, token: int) -> int:
    """``token``, or another of its kind if structured output forbids it."""
    assert state.constraint is not None
    mask = state.constraint.allowed(may_end=state.may_end)
    if mask[token]:
        return token
    ids = np.flatnonzero(mask)
    return int(ids[token % len(ids)])


class Recording(Observer):
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.reasons: list[str] = []

    def step(self, record: StepRecord) -> None:
        self.records.append(record)

    def rejected(self, reason: str) -> None:
        self.reasons.append(reason)


class FakeCore:
    """A core factory for AsyncEngine and LLM; keeps the core and runner it made."""

    def __init__(
        self,
        *,
        ends_every: int = 0,
        poison: int | None = None,
        before_step: Callable[[], None] | None = None,
        verify: bool = True,
        max_model_len: int = 4096,
    ) -> None:
        self._options = {
            "ends_every": ends_every,
            "poison": poison,
            "before_step": before_step,
            "verify": verify,
        }
        self._max_model_len = max_model_len
        self.core: EngineCore | None = None
        self.runner: LedgerRunner | None = None

    def __call__(self, config: EngineConfig, observer: Observer | None = None) -> EngineCore:
        info = fake_info(config, max_model_len=self._max_model_len)
        self.runner = LedgerRunner(info, **self._options)  # type: ignore[arg-type]
        self.core = assemble(config, self.runner, byte_tokenizer(), observer)
        return self.core


def small_config(**changes: object) -> EngineConfig:
    """Small pages and budgets, so that little text makes much happen."""
    return replace(
        EngineConfig(page_size=4, num_pages=64, max_running=8, max_step_tokens=32),
        **changes,  # type: ignore[arg-type]
    )
