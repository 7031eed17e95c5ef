from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metal_emulator import abi
from metal_emulator.assemble import Assembled, Parameter
from metal_emulator.errors import MetalRuntimeError
from metal_emulator.tensors import Tensor, dtype_name, numpy_dtype


class Buffers:
    """Arrays of a launch; keep this object alive while the launch runs."""

    def __init__(
        self,
        assembled: Assembled,
        inputs: Sequence[Tensor],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[Any],
        init_value: float | None,
    ) -> None:
        self.parameters = assembled.parameters
        self._inputs = dict(zip(assembled.source.input_names, inputs, strict=True))
        self._is_initialised = init_value is not None
        self.outputs: dict[str, NDArray[Any]] = {}
        names = assembled.source.output_names
        for name, shape, dtype in zip(names, output_shapes, output_dtypes, strict=True):
            self.outputs[name] = np.zeros(tuple(shape), numpy_dtype(dtype_name(dtype)))
            if init_value is not None:
                self.outputs[name][...] = init_value
        self._alive: list[Any] = []

    def table(self, valid: Mapping[str, NDArray[np.bool_]]) -> ctypes.Array[abi.Buffer]:
        unknown = set(valid) - set(self._inputs)
        if unknown:
            raise MetalRuntimeError(f"valid names {sorted(unknown)}, inputs are {sorted(self._inputs)}")
        table = (abi.Buffer * len(self.parameters))()
        for entry, parameter in zip(table, self.parameters, strict=True):
            array = np.ascontiguousarray(self._array(parameter))
            entry.name = parameter.name.encode()
            entry.host, entry.bytes, entry.kind = array.ctypes.data, array.nbytes, self._kind(parameter)
            self._alive.append(array)
            if parameter.role == "input" and parameter.tensor in valid:
                tensor = self._inputs[parameter.tensor]
                mask = np.broadcast_to(valid[parameter.tensor], tensor.shape).reshape(-1)
                by_byte = np.repeat(mask.astype(np.uint8), tensor.data.itemsize)
                entry.valid = by_byte.ctypes.data
                self._alive.append(by_byte)
        return table

    def _array(self, parameter: Parameter) -> NDArray[Any]:
        if parameter.role == "output":
            return self.outputs[parameter.tensor]
        tensor = self._inputs[parameter.tensor]
        if parameter.role == "shape":
            return np.array(tensor.shape, np.int32)
        if parameter.role == "strides":
            return np.array(tensor.strides, np.int64)
        if parameter.role == "ndim":
            return np.array([tensor.ndim], np.int32)
        return tensor.data

    def _kind(self, parameter: Parameter) -> int:
        if parameter.role != "output":
            return abi.INPUT
        return abi.INITIALISED_OUTPUT if self._is_initialised else abi.OUTPUT
