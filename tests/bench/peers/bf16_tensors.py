from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt


def bf16_tensors(folder: Path) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Yield names and float32 arrays; bf16 is the upper half of float32."""
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise ValueError(f"{name} is {entry['dtype']}, not BF16: convert a model of 16 bits")
            first, last = entry["data_offsets"]
            halves = np.frombuffer(data[start + first : start + last], np.uint16)
            yield name, (halves.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
