"""Weights mapped from their files, so that packing reads them there and never copies all at once."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx

from octavo.kernels import _ext

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
    """Map a ``.safetensors`` file that ``mx.load`` would read. Returns None if it has empty tensors or
    unknown types. The format: 8 bytes little-endian length of a JSON header, the header, then the data
    (https://huggingface.co/docs/safetensors)."""
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
