"""Low-rank adapters (LoRA, DoRA) on Metal: two launches for all layers with one input.

The first launch multiplies each row by the first factors of its adapter. The second multiplies by the other
factors and adds the result to the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .launch import KernelLibrary, Launch, padded, wide
from .units import MIN_ELEMENTS, KernelSource, make_unit

_ROWS = 4
_THREADS = 64


class _Factors(NamedTuple):
    a: mx.array
    b: mx.array
    scale: float
    gain: mx.array | None
    bias: mx.array | None


def shrink_unit(inputs: int, num_layers: int) -> KernelSource:
    macros = {"INPUTS": inputs, "PARTS": num_layers, "ROWS": _ROWS}
    names = ("x", "slots", "places", "a")
    return make_unit("shrink", f"{inputs}_{num_layers}", names, ("z",), macros, {}, ("adapters",))


def expand_unit(outputs: Sequence[int], *, gains: bool) -> KernelSource:
    parts = range(len(outputs))
    macros: dict[str, int | str] = {f"OUTPUTS_{part}": count for part, count in enumerate(outputs)}
    macros |= {
        "PARTS": len(outputs), "ROWS": _ROWS, "THREADS": _THREADS, "GAINS": int(gains),
        "EACH_PART(f)": " ".join(f"f({part})" for part in parts),
    }  # fmt: skip
    letters = ("y", "b", "gains", "biases") if gains else ("y", "b")
    return make_unit(
        "expand",
        "_".join(map(str, outputs)) + ("_gains" if gains else ""),
        ("z", "slots", "places", "scales", *(f"{letter}{part}" for letter in letters for part in parts)),
        tuple(f"to{part}" for part in parts),
        macros,
        {},
        ("adapters",),
    )


class MetalAdapterTable:
    """Low-rank adapters (LoRA, DoRA) for layers that read one input x.

    A slot has one adapter's factors ``a`` [rank, inputs] and ``b`` [rank, outputs] for each layer. They
    change a layer's output y to y + d, where d = ``scale * (x @ a.T) @ b``, or with a gain (DoRA) to ``gain *
    (y - bias + d) + bias``. ``outputs`` has the number of outputs of each layer. Factors are of ``dtype``,
    bfloat16 or float32.
    """

    def __init__(
        self, library: KernelLibrary, inputs: int, outputs: Sequence[int], *, num_slots: int, dtype: mx.Dtype
    ) -> None:
        self._library, self._inputs, self._outputs, self._dtype = library, inputs, tuple(outputs), dtype
        self._num_slots = num_slots
        self._factors: dict[tuple[int, int], _Factors] = {}
        self._arrays: dict[str, mx.array] | None = None
        self._most = MIN_ELEMENTS

    def put(
        self, slot: int, layer: int, a: mx.array, b: mx.array, scale: float, gain: mx.array | None,
        bias: mx.array | None,
    ) -> None:  # fmt: skip
        """Put the factors of one layer into a slot; ``slot`` is at least 1. gain, bias: float32 [outputs]."""
        self._factors[slot, layer] = _Factors(a, b, scale, gain, bias)
        self._arrays = None

    def clear(self, slot: int) -> None:
        for layer in range(len(self._outputs)):
            self._factors.pop((slot, layer), None)
        self._arrays = None

    def add(self, ys: Sequence[mx.array], x: mx.array, slots: mx.array) -> list[mx.array]:
        """Return ``ys``, the outputs [T, outputs] of the layers for x [T, inputs], changed by the adapters.

        slots   int32 [T], slot of each row's adapter; 0: no adapter
        """
        if self._arrays is None:
            self._arrays = self._make_arrays()
        num_rows, num_layers = x.shape[0], len(ys)
        blocks = -(-num_rows // _ROWS)
        given = (
            self._arrays | {"x": x, "slots": wide(slots)} | {f"y{part}": wide(y) for part, y in enumerate(ys)}
        )
        (z,) = self._library.run(
            shrink_unit(self._inputs, num_layers),
            given,
            Launch(
                grid=(32 * blocks, self._most, num_layers),
                threadgroup=(32, 1, 1),
                outputs=(((num_rows, num_layers, self._most), mx.float32),),
            ),
        )
        threads = -(-max(self._outputs) // _THREADS) * _THREADS
        return self._library.run(
            expand_unit(self._outputs, gains="gains0" in given),
            given | {"z": z},
            Launch(
                grid=(threads, blocks, num_layers),
                threadgroup=(_THREADS, 1, 1),
                outputs=tuple((y.shape, y.dtype) for y in ys),
            ),
        )

    def _make_arrays(self) -> dict[str, mx.array]:
        parts = range(len(self._outputs))
        places = np.zeros((self._num_slots + 1, len(parts), 4), np.int32)
        scales = np.zeros((self._num_slots + 1, len(parts)), np.float32)
        a: list[mx.array] = [mx.zeros((MIN_ELEMENTS, self._inputs), self._dtype)]
        b = [[mx.zeros((MIN_ELEMENTS, count), self._dtype)] for count in self._outputs]
        a_rows, b_rows = MIN_ELEMENTS, [MIN_ELEMENTS for _ in parts]
        for (slot, part), factors in self._factors.items():
            rank = factors.a.shape[0]
            places[slot, part] = a_rows, b_rows[part], rank, factors.gain is not None
            scales[slot, part] = factors.scale
            a.append(factors.a)
            b[part].append(factors.b)
            a_rows, b_rows[part] = a_rows + rank, b_rows[part] + rank
        self._most = max(MIN_ELEMENTS, int(places[..., 2].max()))
        arrays = {"places": padded(places.reshape(-1)), "scales": padded(scales.reshape(-1))}
        arrays |= {"a": mx.concatenate(a)} | {f"b{part}": mx.concatenate(b[part]) for part in parts}
        if places[..., 3].any():
            for part, count in enumerate(self._outputs):
                gains, biases = mx.ones((self._num_slots + 1, count)), mx.zeros((self._num_slots + 1, count))
                for (slot, layer), factors in self._factors.items():
                    if layer == part and factors.gain is not None:
                        gains[slot] = factors.gain
                        biases[slot] = 0 if factors.bias is None else factors.bias
                arrays |= {f"gains{part}": wide(gains), f"biases{part}": wide(biases)}
        mx.eval(arrays)
        return arrays


_LIMIT = 1e-5
"""Largest allowed error relative to the largest output, for float32 sums of 64 products."""


def adapter_problem(library: KernelLibrary) -> str | None:
    """Test the adapter kernels; return one line about the failure, or None if they pass."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32))

    inputs, outputs, slots = 64, (48, 70), mx.array([1, 2, 0, 1, 1, 1, 1, 1, 2], mx.int32)
    table = MetalAdapterTable(library, inputs, outputs, num_slots=2, dtype=mx.float32)
    x, ys = normal(9, inputs), [normal(9, count) for count in outputs]
    wanted = [y + 0 for y in ys]
    for slot, layer in ((1, 0), (1, 1), (2, 1)):
        a, b, gain, bias = (
            normal(5, inputs),
            normal(5, outputs[layer]),
            *(normal(outputs[layer]) for _ in "gb"),
        )
        table.put(slot, layer, a, b, 0.5, gain, bias)
        adapted = gain * (ys[layer] - bias + 0.5 * (x @ a.T) @ b) + bias
        wanted[layer] = mx.where((slots == slot)[:, None], adapted, wanted[layer])
    try:
        got = table.add(ys, x, slots)
        pairs = zip(got, wanted, strict=True)
        worst = float(np.max([np.array(mx.abs(g - w).max() / mx.abs(w).max()) for g, w in pairs]))
    except RuntimeError as failed:  # a kernel does not compile or launch
        return (str(failed).strip() or type(failed).__name__).splitlines()[0]
    if not worst < _LIMIT:  # also true for NaN
        return f"outputs have error {worst:.2g} of the largest value, limit {_LIMIT}"
    return None
