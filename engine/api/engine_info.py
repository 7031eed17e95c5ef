"""Facts about a running engine for the server, the command line and the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from octavo.block_manager import KVGroupSpec, RecurrentState


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes, printed at start; the pool is allocated once and never grows. ``residual``: of ``pages``, those
    in 16 bits beside quantized ones; ``drafts``: pages of a draft model or head, out of the same budget;
    ``unread``: of ``weights``, what no step reads; ``adapters``: that they may take."""

    weights: int
    pages: int
    workspace: int
    states: int = 0
    residual: int = 0
    drafts: int = 0
    unread: int = 0
    adapters: int = 0


class AdapterInfo(NamedTuple):
    """A loaded adapter: its folder, the SHA-256 of its files, its largest rank, and the bytes it takes."""

    name: str
    path: str
    digest: bytes
    rank: int
    nbytes: int

    @property
    def variant(self) -> bytes:
        """The name of what tells the pages of its requests from those of others."""
        return b"lora" + self.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about a running engine, for clients, metrics and people.

    name           what clients are told ("demo", a folder's name, a hub id, or what the operator chose)
    embeds         whether hidden states can be had: the output head, and so what it gets, was found
    aliases        further names that the operator chose
    chat_template  a file in the place of the model's own template
    backend_reason why this backend was chosen, for people
    kv_format      page formats of K and V: "fp4", or "int8/fp4" where they differ
    weights        "bf16", "int4", ...: what the linear layers compute with
    num_pages      of the pool that every sequence needs for its whole length; where layers have
                   windows, ``groups`` says what each kind of layer has (empty: one kind), and then
                   its residual windows, if there are any
    row_tile       rows that its matrix products compute at once, in the time that some of them would take
    residual_pages  last pages of a sequence that are read in 16 bits (0: pages of one kind)
    batch_invariant  every layer is computed by native kernels, attention from pages: a row has the same bits
                   beside any others
    adapters       that were loaded at start
    states         slots of recurrent layers; None for models without any
    recurrent      how many of which layers are recurrent, for people; empty without any
    """

    name: str
    path: Path
    architecture: str
    num_layers: int
    vocab_size: int
    max_model_len: int
    backend: str
    backend_reason: str
    threads: int
    weights: str
    kv_format: str
    page_size: int
    num_pages: int
    memory: MemoryBudget
    embeds: bool = False
    aliases: tuple[str, ...] = ()
    chat_template: Path | None = None
    groups: tuple[KVGroupSpec, ...] = ()
    row_tile: int = 1
    residual_pages: int = 0
    batch_invariant: bool = False
    adapters: tuple[AdapterInfo, ...] = ()
    states: RecurrentState | None = None
    recurrent: str = ""
