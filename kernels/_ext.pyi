"""The native CPU extension, built from csrc/; ImportError where it was not built or does not fit."""

from collections.abc import Sequence

import mlx.core as mx

mlx_version: str

def isa() -> str: ...
def threads() -> int: ...
def set_threads(n: int) -> None: ...

# ---- pages and paged attention (csrc/pages.cpp, csrc/attention.cpp) ----

class PageLayout:
    @property
    def head_bytes(self) -> int: ...
    @property
    def pool_bytes(self) -> int: ...

def page_layout(
    num_pages: int, num_heads: int, page_size: int, k_format: str, k_dim: int, v_format: str, v_dim: int
) -> PageLayout: ...
def create_pool(layout: PageLayout) -> mx.array: ...
def write_pages(
    layout: PageLayout,
    pool: mx.array,
    keys: mx.array,
    values: mx.array,
    slots: mx.array,
    flags: mx.array,
) -> tuple[mx.array, mx.array]: ...
def copy_pages(layout: PageLayout, pool: mx.array, pairs: Sequence[tuple[int, int]]) -> mx.array: ...
def gather_pages(
    layout: PageLayout,
    pool: mx.array,
    page_table: mx.array,
    kv_len: mx.array,
    length: int,
    like: mx.array,
) -> tuple[mx.array, mx.array]: ...
def attend(
    layout: PageLayout,
    pool: mx.array,
    queries: mx.array,
    page_table: mx.array,
    q_start: mx.array,
    kv_len: mx.array,
    scale: float,
    window: int,
    keep: int,
    softcap: float,
    sinks: mx.array | None,
) -> mx.array: ...
