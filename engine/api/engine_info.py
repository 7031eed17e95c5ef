from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from octavo.block_manager import KVGroupSpec, RecurrentState

from .image import ImageRules


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory of the engine in bytes. ``adapters`` is a limit; ``unread`` is a part of ``weights``."""

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
    """A loaded LoRA adapter. ``digest`` is the SHA-256 of its files."""

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

    aliases          alternative model names for clients
    kv_format        page formats of K and V: "fp4", or "int8/fp4" if they differ
    weights          number format of linear layers: "bf16", "int4", ...
    residual_pages   pages per sequence that are kept in 16 bits
    batch_invariant  whether results are bit-identical in any batch
    images           preprocessing of images; None if the model takes only text
    memory           memory of this process
    other_ranks      memory of the other processes that compute the model
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
    other_ranks: tuple[MemoryBudget, ...] = ()
