from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map

from octavo.kernels import _ext
from octavo.kernels.channel_weights import BITS, Quantized

from ..adapt.output_head import TakeRows
from ..model_ops import Fusion, ModelOps, Report, parameter_bytes
from ..overrides import replaced
from ..sampling.native_sampling import NativeSampler
from .activations import originals
from .comparison import recorded
from .image_attention import NativeImageAttention
from .merged import observe
from .modules import (
    multiplications,
    packed_bytes,
    replace_modules,
    replaceable,
    set_fused,
    unfuse,
    unread_bytes,
)
from .rope import computed_in_float32

_DTYPES = {
    "BF16": mx.bfloat16,
    "F16": mx.float16,
    "F32": mx.float32,
    "U8": mx.uint8,
    "U16": mx.uint16,
    "U32": mx.uint32,
    "I8": mx.int8,
    "I16": mx.int16,
    "I32": mx.int32,
    "I64": mx.int64,
}


def map_safetensors(path: str | Path) -> dict[str, mx.array] | None:
    """Map a ``.safetensors`` file; None if it has empty tensors or unknown types."""
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    if not all(tensor["dtype"] in _DTYPES and 0 not in tensor["shape"] for tensor in header.values()):
        return None
    file = _ext.MappedFile(str(path))
    return {
        name: file.view(8 + length + tensor["data_offsets"][0], tensor["shape"], _DTYPES[tensor["dtype"]])
        for name, tensor in header.items()
    }


log = logging.getLogger(__name__)

MAX_UNTOUCHED_BYTES = 1 << 21
"""Largest number of multiplications per row for a reference by MLX's own layers."""

_QUANTIZED_HERE = ((64, 8), (64, 4))  # (group size, bits)


class NativeOps(ModelOps):
    fusion = Fusion(set_fused, unfuse)

    @property
    def take_rows(self) -> TakeRows:
        return _ext.compute_rows

    def loading(self) -> AbstractContextManager[None]:
        """Map weights from their files while the block runs."""

        def mapping(original: Any) -> Any:
            def load(file: Any, *unusual: Any, **more: Any) -> Any:
                plain = not unusual and not more and str(file).endswith(".safetensors")
                mapped = map_safetensors(file) if plain else None
                return original(file, *unusual, **more) if mapped is None else mapped

            return load

        return replaced((mx, "load", mapping))

    def quantizing(self) -> AbstractContextManager[None]:
        """Quantize with the native kernel, on all threads, while the block runs."""

        def by_kernel(original: Any) -> Any:
            def quantize_array(w: Any, *settings: Any, **more: Any) -> Any:
                if settings in _QUANTIZED_HERE and more == {"mode": "affine"}:
                    return _ext.quantize_weights(w, group_size=settings[0], bits=settings[1])
                return original(w, *settings, **more)

            return quantize_array

        return replaced((mx, "quantize", by_kernel))

    def quantize_channels(self, kind: str, arrays: Sequence[mx.array], group_size: int) -> Quantized:
        kernel = _ext.quantize_channels if len(arrays) == 1 else _ext.requantize_channels
        return kernel(*arrays, group_size=group_size, bits=BITS[kind])

    def prepare_model(
        self, model: Module, *, exact: bool, fuse: bool, reference: Callable[[], None]
    ) -> Report | None:
        with recorded(replaceable(model)) as calls:
            seen = observe(lambda: model(mx.array([[0, 1]])))
            model(mx.array([[0], [1], [2]]))
        seen = replace(seen, groups=seen.groups if fuse else (), calls=calls)
        untouched = multiplications(model) <= MAX_UNTOUCHED_BYTES

        def refer(now: bool) -> None:
            if now:
                with originals(), computed_in_float32():
                    reference()

        refer(untouched)
        report = replace_modules(
            model, exact=exact, fuse=fuse, observed=seen, between=lambda: refer(not untouched)
        )
        kept = dict(Counter(each.type for each in report.kept))
        log.info("native layers: %s; layers computed by MLX: %s", report.replaced, kept or "none")
        model.update(tree_map(_ext.copy_of, model.parameters()))
        return report

    def prepare_tower(self, tower: Module, *, exact: bool) -> NativeImageAttention:
        replace_modules(tower, exact=exact, fuse=False)
        return NativeImageAttention(exact=exact)

    def weight_bytes(self, model: Module) -> int:
        return parameter_bytes(model) + packed_bytes(model)

    def unread_weight_bytes(self, model: Module) -> int:
        return unread_bytes(model)

    def sampler(self) -> NativeSampler:
        return NativeSampler()
