"""A name for what a model computes, so that K/V of one model is never given to another."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..memory.budget import tensors_of, weight_files

SAMPLE_BYTES = 4096


def model_fingerprint(path: Path, *, weights: str, exact: bool) -> str:
    """SHA-256, hexadecimal, over ``config.json``, the header of each weight file, and the first and
    last 4 KiB of every tensor: training changes nearly every value of a tensor that it changes at
    all, and so little is read in milliseconds.

    weights, exact   as configured: both change what the linear layers compute. The backend is not
                     part of it: backends agree to rounding.
    """
    total = hashlib.sha256(f"octavo model 1\0{weights}\0{exact}\0".encode())
    total.update((path / "config.json").read_bytes())
    for file in weight_files(path):
        tensors = tensors_of(file)
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            total.update(stream.read(size))
            for tensor in tensors.values():
                start, end = (8 + size + offset for offset in tensor["data_offsets"])
                stream.seek(start)
                total.update(stream.read(min(SAMPLE_BYTES, end - start)))
                stream.seek(max(start, end - SAMPLE_BYTES))
                total.update(stream.read(min(SAMPLE_BYTES, end - start)))
    return total.hexdigest()
