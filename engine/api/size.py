from __future__ import annotations

import re

from .errors import InvalidConfig

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_size(text: str, *, least: int = 1) -> int:
    """Parse "2GiB", "512MiB", "1.5G" (GiB), "300MB" (decimal) or a plain number as bytes. Raises
    InvalidConfig for other text and for sizes below ``least``."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise InvalidConfig(f"size must be a number with a unit such as MiB, GiB, MB or GB, got {text!r}")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size < least:
        raise InvalidConfig(f"size must be at least one byte, got {text!r}")
    return size
