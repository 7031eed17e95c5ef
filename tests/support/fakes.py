"""An engine without a model: ledger core, byte tokenizer and small settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from fake_images import FakeImages
from ledger_runner import EOS, LedgerRunner
from octavo.block_manager import KVGroupSpec, RecurrentState
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.engine_info import EngineInfo, MemoryBudget
from octavo.engine.api.stats import Observer, StepRecord
from octavo.engine.core.build import assemble
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.executor.base import Adapters
from octavo.engine.kv_store.folder import ShardFolder
from octavo.engine.kv_store.page_store import PageStore
from octavo.engine.kv_store.shard_store import ShardStore
from octavo.engine.tokenizer.chat_template import ChatTemplate
from octavo.engine.tokenizer.tokenizer import Tokenizer

VOCAB_SIZE = 258
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def byte_tokenizer(
    *,
    eos_ids: frozenset[int] = frozenset({EOS}),
    template: str = CHAT_TEMPLATE,
    specials: Sequence[str] = (),
    **parsers: Any,
) -> Tokenizer:
    """IDs 0 to 255 are bytes, 256 ends a text, later IDs are special tokens."""
    characters = {byte: character for character, byte in byte_alphabet().items()}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<pad>", *specials])
    return Tokenizer(backend, eos_ids=eos_ids, chat_template=ChatTemplate(template, {}), **parsers)


def byte_alphabet() -> dict[str, int]:
    """Return printable characters for the 256 bytes in ByteLevel tokenizers (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update((chr(256 + index), byte) for index, byte in enumerate(others))
    return table


def fake_info(
    config: EngineConfig,
    *,
    num_pages: int = 64,
    max_model_len: int = 4096,
    groups: tuple[KVGroupSpec, ...] = (),
    states: RecurrentState | None = None,
) -> EngineInfo:
    return EngineInfo(
        name="fake",
        path=Path("fake"),
        architecture="ledger",
        num_layers=1,
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len or max_model_len,
        backend="reference",
        backend_reason="a fake",
        threads=1,
        weights="bf16",
        kv_format=str(config.page_formats),
        page_size=config.page_size,
        num_pages=groups[0].num_pages if groups else config.num_pages or num_pages,
        memory=MemoryBudget(weights=0, pages=0, workspace=0),
        groups=groups,
        states=states,
    )


class Recording(Observer):
    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.reasons: list[str] = []

    def step(self, record: StepRecord) -> None:
        self.records.append(record)

    def rejected(self, reason: str) -> None:
        self.reasons.append(reason)


class FakeCore:
    def __init__(
        self,
        *,
        ends_every: int = 0,
        poison: int | None = None,
        before_step: Callable[[], None] | None = None,
        verify: bool = True,
        feeds: bool = False,
        max_model_len: int = 4096,
        groups: tuple[KVGroupSpec, ...] = (),
        states: RecurrentState | None = None,
        clock: Callable[[], float] = time.monotonic,
        tokenizer: Tokenizer | None = None,
        adapters: Adapters | None = None,
        images: FakeImages | None = None,
    ) -> None:
        self._adapters = adapters
        self._images = images
        self._clock = clock
        self._tokenizer = tokenizer or byte_tokenizer()
        self._options = {
            "ends_every": ends_every,
            "poison": poison,
            "before_step": before_step,
            "verify": verify,
            "feeds": feeds,
        }
        self._max_model_len = max_model_len
        self._groups = groups
        self._states = states
        self.core: EngineCore | None = None
        self.runner: LedgerRunner | None = None

    def __call__(self, config: EngineConfig, observer: Observer | None = None) -> EngineCore:
        info = fake_info(config, max_model_len=self._max_model_len, groups=self._groups, states=self._states)
        if self._images is not None:
            info = replace(info, images=self._images.rules)
        self.runner = LedgerRunner(info, **self._options)  # type: ignore[arg-type]
        self.runner.adapters = self._adapters
        self.runner.images = self._images
        self.core = assemble(config, self.runner, self._tokenizer, observer, clock=self._clock)
        return self.core


def shard_store(core: EngineCore) -> ShardStore:
    connector = core._scheduler._connector
    assert isinstance(connector, PageStore)
    assert connector.shards is not None
    return connector.shards


def shard_folder(core: EngineCore) -> ShardFolder:
    folder = shard_store(core).folder
    assert isinstance(folder, ShardFolder)
    return folder


def small_config(**changes: object) -> EngineConfig:
    return replace(
        EngineConfig(page_size=4, num_pages=64, max_running=8, max_step_tokens=32),
        **changes,  # type: ignore[arg-type]
    )
