from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

METAL_TYPES = {
    "bool": "bool",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float16": "float16_t",
    "float32": "float",
    "bfloat16": "bfloat16_t",
}


def dtype_name(dtype: Any) -> str:
    """Return the MLX name of a dtype, which may be a name or a dtype of NumPy, ml_dtypes or MLX."""
    if isinstance(dtype, str):
        name = dtype
    elif type(dtype).__module__.startswith("mlx"):
        name = str(dtype).rsplit(".", 1)[-1]
    else:
        name = np.dtype(dtype).name
    if name not in METAL_TYPES:
        raise TypeError(f"dtype {name!r} has no Metal type: use one of {', '.join(METAL_TYPES)}")
    return name


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of an MLX dtype name; bfloat16 is from ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


@dataclass(frozen=True)
class Tensor:
    """An argument of a launch; `data` is flat and contiguous."""

    data: NDArray[Any]
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return int(self.data.size)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements; every input has a row-contiguous layout."""
        strides = [1] * self.ndim
        for axis in range(self.ndim - 2, -1, -1):
            strides[axis] = strides[axis + 1] * self.shape[axis + 1]
        return tuple(strides)

    @classmethod
    def of(cls, value: Any) -> Tensor:
        """Make a tensor of a NumPy or MLX array or a Python scalar (float32, int32 or bool, as in MLX)."""
        if isinstance(value, Tensor):
            return value
        if type(value).__module__.startswith("mlx"):
            array = _from_mlx(value)
        elif isinstance(value, bool):
            array = np.array(value)
        elif isinstance(value, int):
            array = np.array(value, np.int32)
        elif isinstance(value, float):
            array = np.array(value, np.float32)
        else:
            array = np.asarray(value)
        return cls(np.ascontiguousarray(array).reshape(-1), dtype_name(array.dtype), array.shape)


def _from_mlx(value: Any) -> NDArray[Any]:
    if dtype_name(value.dtype) != "bfloat16":
        return np.array(value)
    import mlx.core as mx

    bits: NDArray[Any] = np.array(value.view(mx.uint16))
    return bits.view(ml_dtypes.bfloat16)
