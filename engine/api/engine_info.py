"""Facts about a running engine for the server, the command line and the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from octavo.block_manager import KVGroupSpec, RecurrentState

from .image import ImageRules


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory of the engine by use, in bytes. The page pool is allocated once and never grows.

    residual   16-bit pages next to quantized ones; part of ``pages``
    drafts     KV pages of a draft model or head, taken from the same budget
    unread     weights that no step reads; part of ``weights``
    adapters   limit of the memory for adapters
    vision     weights for images, and the limit of encoded images
    """

    weights: int
    pages: int
    workspace: int
    states: int = 0
    residual: int = 0
    drafts: int = 0
    unread: int = 0
    adapters: int = 0
    vision: int = 0


class AdapterInfo(NamedTuple):
    """A loaded adapter: its folder, the SHA-256 of its files, its largest rank, and its bytes."""

    name: str
    path: str
    digest: bytes
    rank: int
    nbytes: int

    @property
    def variant(self) -> bytes:
        """The variant that keeps cached pages of this adapter apart from pages of others."""
        return b"lora" + self.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about a running engine, for clients, metrics and people.

    name           name for clients ("demo", a folder's name, a hub id, or the operator's choice)
    embeds         whether embeddings are available, which needs a known output head
    aliases        further names that the operator chose
    chat_template  file of a template that replaces the model's
    backend_reason reason for choosing this backend, as text
    kv_format      page formats of K and V: "fp4", or "int8/fp4" where they differ
    weights        number format of linear layers: "bf16", "int4", ...
    num_pages      pages in the pool of layers that keep whole sequences
    groups         if some layers have windows, the page groups of each kind of layer, and then those
                   of residual windows (empty: all layers are of one kind)
    row_tile       rows per tile of a matrix product; a partly filled tile takes as long as a full one
    residual_pages  last pages of a sequence that are read in 16 bits (0: pages of one kind)
    batch_invariant  whether native kernels compute every layer, so that the result of a row has the
                   same bits in any batch
    adapters       adapters that were loaded at start
    images         how pictures become rows of prompts; None: prompts are text
    states         slots of recurrent layers; None for models without recurrent layers
    recurrent      number and kind of recurrent layers, as text; empty without recurrent layers
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
    images: ImageRules | None = None
    states: RecurrentState | None = None
    recurrent: str = ""
