"""The native CPU extension, built from csrc/; ImportError where it was not built or does not fit."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

ABI_VERSION: int
mlx_version: str

def isa() -> str: ...
def threads() -> int: ...
def set_threads(n: int) -> None: ...

class PackedWeight:
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def dtype(self) -> mx.Dtype: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def unread_nbytes(self) -> int: ...

def pack_dense(weight: mx.array, bias: mx.array | None = None) -> PackedWeight: ...
def pack_stacked(weights: Sequence[mx.array], bias: mx.array | None = None) -> PackedWeight: ...
def pack_affine(
    codes: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    group_size: int,
    bits: int,
    bias: mx.array | None = None,
) -> PackedWeight: ...
def pack_stacked_affine(
    codes: Sequence[mx.array],
    scales: Sequence[mx.array],
    biases: Sequence[mx.array],
    *,
    group_size: int,
    bits: int,
    bias: mx.array | None = None,
) -> PackedWeight: ...
def pack_fp4(
    codes: mx.array, scales: mx.array, *, mode: str, bias: mx.array | None = None
) -> PackedWeight: ...
def pack_stacked_fp4(
    codes: Sequence[mx.array], scales: Sequence[mx.array], *, mode: str, bias: mx.array | None = None
) -> PackedWeight: ...
def unpack(weight: PackedWeight) -> list[mx.array]: ...
def linear(
    x: mx.array,
    weight: PackedWeight,
    *,
    residual: mx.array | None = None,
    exact: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array: ...
def linear_argmax(
    x: mx.array,
    weight: PackedWeight,
    *,
    exact: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, mx.array]: ...

class PackedExperts:
    def __init__(self, experts: list[PackedWeight]) -> None: ...
    @property
    def experts(self) -> list[PackedWeight]: ...
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def unread_nbytes(self) -> int: ...

def gather_linear(
    x: mx.array,
    experts: PackedExperts,
    ids: mx.array,
    *,
    exact: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array: ...

class AdapterFactors:
    @property
    def nbytes(self) -> int: ...

def adapter_factors(
    a: mx.array,
    b: mx.array,
    *,
    scale: float,
    gain: mx.array | None = None,
    bias: mx.array | None = None,
) -> AdapterFactors: ...

class AdapterTable:
    def __init__(self, inputs: int, outputs: Sequence[int], experts: int, num_slots: int) -> None: ...
    def put(self, slot: int, part: int, factors: AdapterFactors) -> None: ...
    def clear(self, slot: int) -> None: ...

def add_adapters(
    y: mx.array,
    x: mx.array,
    slots: mx.array,
    table: AdapterTable,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array: ...
def add_expert_adapters(
    y: mx.array,
    x: mx.array,
    places: mx.array,
    table: AdapterTable,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array: ...
def take_rows(
    weight: PackedWeight, ids: mx.array, *, stream: mx.Stream | mx.Device | None = None
) -> mx.array: ...
def rms_norm(
    x: mx.array,
    weight: mx.array | None,
    eps: float,
    *,
    fuse: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array: ...
def layer_norm(
    x: mx.array,
    weight: mx.array | None,
    bias: mx.array | None,
    eps: float,
    *,
    fuse: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array: ...
def gated(
    gate: mx.array,
    up: mx.array | None,
    activation: str,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array: ...
def rope(
    x: mx.array,
    offset: int | mx.array,
    inverse_frequencies: mx.array,
    *,
    dims: int,
    interleaved: bool = False,
    position_scale: float = 1.0,
    value_scale: float = 1.0,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array: ...
def shortcut(x: mx.array) -> mx.array: ...
def same_array(a: mx.array, b: mx.array) -> bool: ...

class LogitAdjustments:
    def __init__(
        self,
        bias_ids: NDArray[np.int64],
        bias: NDArray[np.float32],
        seen_ids: NDArray[np.int64],
        repetition_penalty: float,
        output_ids: NDArray[np.int64],
        output_counts: NDArray[np.float32],
        frequency_penalty: float,
        presence_penalty: float,
        suppressed_ids: NDArray[np.int64],
    ) -> None: ...

class Draw:
    def __init__(
        self,
        row: int,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        counter: int,
        changes: LogitAdjustments | None = None,
        allowed: NDArray[np.bool_] | None = None,
        num_top: int | None = None,
    ) -> None: ...

class TokenScore:
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> list[tuple[int, float]]: ...

class Drawn:
    @property
    def token(self) -> int | None: ...
    @property
    def score(self) -> TokenScore | None: ...

def draw_tokens(logits: mx.array, draws: list[Draw]) -> list[Drawn]: ...
def score_tokens(logits: mx.array, targets: Sequence[tuple[int, int, int]]) -> list[TokenScore | None]: ...
def recurrence(
    name: str,
    pool: mx.array,
    segments: mx.array,
    checkpoints: mx.array,
    inputs: list[mx.array],
    options: list[float],
) -> tuple[mx.array, mx.array]: ...
def rows_behind(x: mx.array, count: int) -> mx.array: ...
def mark_nonfinite(flags: mx.array, segments: mx.array, checkpoints: mx.array, y: mx.array) -> mx.array: ...

class Arena:
    def __init__(self) -> None: ...
    @property
    def nbytes(self) -> int: ...

class Program:
    def __init__(
        self, arena: Arena, filled: list[mx.array], fixed: list[mx.array], outputs: list[mx.array]
    ) -> None: ...
    def run(self, values: Sequence[NDArray[np.int32]]) -> None: ...
    @property
    def outputs(self) -> list[mx.array]: ...
    @property
    def num_tasks(self) -> int: ...
    @property
    def num_evaluated(self) -> int: ...

def kernel_seconds() -> float: ...
def kept_bytes() -> int: ...
def release_kept() -> None: ...

class MappedFile:
    def __init__(self, path: str) -> None: ...
    def view(self, offset: int, shape: list[int], dtype: mx.Dtype) -> mx.array: ...

def copy_of(array: mx.array) -> mx.array: ...
def quantize_channels(
    w: mx.array, *, group_size: int, bits: int, stream: mx.Stream | mx.Device | None = None
) -> tuple[mx.array, mx.array, mx.array]: ...
def requantize_channels(
    codes: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    group_size: int,
    bits: int,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, mx.array, mx.array]: ...
def quantize_weights(
    w: mx.array, *, group_size: int, bits: int, stream: mx.Stream | mx.Device | None = None
) -> tuple[mx.array, mx.array, mx.array]: ...
def select_rows(x: mx.array, ids: mx.array, *, stream: mx.Stream | mx.Device | None = None) -> mx.array: ...
def compute_rows(x: mx.array, ids: mx.array, *, stream: mx.Stream | mx.Device | None = None) -> mx.array: ...
def measure_flops() -> tuple[float, float]: ...

class PageLayout:
    @property
    def head_bytes(self) -> int: ...
    @property
    def pool_bytes(self) -> int: ...

def page_layout(
    num_pages: int, num_heads: int, page_size: int, k_format: str, k_dim: int, v_format: str, v_dim: int
) -> PageLayout: ...
def create_pool(layout: PageLayout) -> mx.array: ...
def zeroed_rows(count: int, bytes: int) -> mx.array: ...
def write_pages(
    layout: PageLayout,
    pool: mx.array,
    keys: mx.array,
    values: mx.array,
    slots: mx.array,
    flags: mx.array,
) -> tuple[mx.array, mx.array]: ...
def copy_pages(layout: PageLayout, pool: mx.array, pairs: list[tuple[int, int]]) -> mx.array: ...
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
    mask: mx.array | None,
    rotary: mx.array | None,
    exact: bool,
    residual: tuple[PageLayout, mx.array, mx.array, mx.array, int, int] | None = None,
) -> mx.array: ...
