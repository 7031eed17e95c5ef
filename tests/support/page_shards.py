"""Pages whose bytes are a function of their digest."""

from __future__ import annotations

import hashlib

import numpy as np

from octavo.block_manager import Digest
from octavo.block_manager.digests import TOKEN_BYTES, pack, root, sha256_chain
from octavo.engine.kv_store.folder import ShardFolder
from octavo.engine.kv_store.page_runs import PageLayoutKey, PagePart, PageRun
from octavo.kernels.interface import LayerSpec, PoolSpec
from octavo.kernels.page_bytes import PageBytes

PAGE_SIZE = 4


def make_kind(
    *, model: str = "m", page_size: int = PAGE_SIZE, k_format: str = "bf16", v_format: str = "fp4"
) -> PageLayoutKey:
    layers = (LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64),) * 2
    spec = PoolSpec(layers=layers, num_pages=1, page_size=page_size, k_format=k_format, v_format=v_format)
    return PageLayoutKey(model, (spec,))


def chain_of(number: int, length: int) -> tuple[list[int], list[Digest]]:
    """Return tokens and digests of the pages of one sequence."""
    tokens = [number * 1000 + position for position in range(length * PAGE_SIZE)]
    return tokens, sha256_chain(root(b""), pack(tokens), PAGE_SIZE * TOKEN_BYTES)


def bytes_of(digest: Digest, kind: PageLayoutKey) -> PageBytes:
    return np.frombuffer(hashlib.shake_128(digest).digest(kind.specs[0].page_bytes), np.uint8)


def make_run(number: int, index: int, kind: PageLayoutKey) -> tuple[Digest, PageRun]:
    tokens, digests = chain_of(number, index + 1)
    parent = digests[index - 1] if index else root(b"")
    part = PagePart((0,), bytes_of(digests[index], kind)[None])
    return digests[index], PageRun(kind, parent, tuple(tokens[index * PAGE_SIZE :]), (part,))


def read_page(folder: ShardFolder, number: int, index: int) -> PageBytes:
    digest, run = make_run(number, index, folder.kind)
    return folder.get(digest, parent=run.parent, token_ids=run.token_ids)
