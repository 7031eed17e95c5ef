"""The native CPU extension, built from csrc/; ImportError where it was not built or does not fit."""

import mlx.core as mx

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

def pack_dense(weight: mx.array, bias: mx.array | None = None) -> PackedWeight: ...
def pack_affine(
    codes: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    group_size: int,
    bits: int,
    bias: mx.array | None = None,
) -> PackedWeight: ...
def linear(
    x: mx.array,
    weight: PackedWeight,
    *,
    residual: mx.array | None = None,
    exact: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array: ...
def take_rows(
    weight: PackedWeight, ids: mx.array, *, stream: mx.Stream | mx.Device | None = None
) -> mx.array: ...
def rms_norm(
    x: mx.array, weight: mx.array | None, eps: float, *, stream: mx.Stream | mx.Device | None = None
) -> mx.array: ...
def swiglu(
    gate: mx.array, up: mx.array, *, stream: mx.Stream | mx.Device | None = None
) -> mx.array: ...
