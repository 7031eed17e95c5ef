"""Traces in the Mooncake format: one JSON object per request and line.

    {"timestamp": 0, "input_length": 700, "output_length": 52, "hash_ids": [0, 17]}

``timestamp`` is in milliseconds, lengths are in tokens, and ``hash_ids`` names the prompt's blocks
of 512 tokens each, the last one shorter; equal ids mean equal tokens up to the block's end.
Published with Mooncake (Qin et al., FAST 2025), https://github.com/kvcache-ai/Mooncake.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.engine.api.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace.

    page_ids   one number per page of the prompt; equal numbers mean equal tokens up to the page's end
    ends_partial   whether the last page is not full
    """

    timestamp_ms: float
    output_tokens: int
    page_ids: list[int]
    salt: bytes = b""
    ends_partial: bool = False


def read_trace(path: Path, *, page_size: int = 512, salt_field: str | None = None) -> list[TraceRequest]:
    """Return the requests of a trace in file order; InvalidRequest names the file, the line and the rule.

    page_size    tokens per id; a trace is refused if its prompt lengths do not match
    salt_field   name of the field that separates tenants
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the trace {path}: {error}; give a JSONL file") from None
    numbers: dict[Any, int] = {}
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests.append(_parse(json.loads(line), numbers, page_size, salt_field))
        except (ValueError, TypeError, KeyError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else f"is not a request: {error}"
            raise InvalidRequest(f"{path}, line {number} {what}; see `octavo replay --help`") from None
    if not requests:
        raise InvalidRequest(f"the trace {path} has no requests; give a file with one per line")
    return requests


def _parse(
    row: dict[str, Any], numbers: dict[Any, int], page_size: int, salt_field: str | None
) -> TraceRequest:
    hash_ids, length = row["hash_ids"], int(row["input_length"])
    if not isinstance(hash_ids, list) or not all(isinstance(value, int | str) for value in hash_ids):
        raise ValueError(f"hash_ids must be a list of ids, got {hash_ids!r}")
    if -(-length // page_size) != len(hash_ids):
        raise ValueError(
            f"input_length {length} takes {-(-length // page_size)} pages of {page_size} tokens and it has "
            f"{len(hash_ids)} ids; --page-size must be the tokens one id stands for"
        )
    return TraceRequest(
        timestamp_ms=float(row["timestamp"]),
        output_tokens=int(row["output_length"]),
        page_ids=[numbers.setdefault(value, len(numbers)) for value in hash_ids],
        salt=b"" if salt_field is None else json.dumps(row.get(salt_field)).encode(),
        ends_partial=length % page_size > 0,
    )
