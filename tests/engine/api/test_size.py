from __future__ import annotations

import pytest

from octavo.engine import InvalidConfig
from octavo.engine.api.size import parse_size

GIB = 1024**3


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * GIB),
        ("2gib", 2 * GIB),
        ("1.5G", 3 * GIB // 2),
        ("512 MiB", GIB // 2),
        ("300MB", 300_000_000),
        ("64K", 65536),
        ("4096", 4096),
        ("10B", 10),
        (" 1 TiB ", 1024 * GIB),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2XB", "1e9", "0", "0.1B", "2 Gi B", "nan"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="size"):
        parse_size(text)
