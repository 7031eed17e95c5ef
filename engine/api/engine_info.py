"""Facts about a running engine for the server, the command line and the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from octavo.block_manager import KVGroupSpec, RecurrentState

from .image import ImageRules


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory of the engine by use, in bytes.

    residual   16-bit pages next to quantized ones; included in ``pages``
    drafts     KV pages of a draft model
    unread     weights that no step reads; included in ``weights``
    adapters   limit on memory for adapters
    vision     weights of the image encoder, plus the limit on cached images
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
    """Loaded LoRA adapter. ``digest`` is the SHA-256 of its files; ``rank`` is its largest rank."""

    name: str
    path: str
    digest: bytes
    rank: int
    nbytes: int

    @property
    def variant(self) -> bytes:
        return b"lora" + self.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about a running engine.

    name             model name for clients
    embeds           whether embeddings are available
    aliases          further model names for clients
    chat_template    file of a template that replaces the model's
    backend_reason   why this backend was chosen
    kv_format        page formats of K and V: "fp4", or "int8/fp4" if they differ
    weights          number format of linear layers: "bf16", "int4", ...
    num_pages        pages in the pool
    row_tile         rows per tile of a matrix product
    residual_pages   last pages of a sequence that are kept in 16 bits; 0 if none
    batch_invariant  whether a row's result has the same bits in any batch
    adapters         adapters that were loaded at start
    images           preprocessing of images; None if the model takes only text
    states           state slots of recurrent layers; None without recurrent layers
    recurrent        number and kind of recurrent layers, as text
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
