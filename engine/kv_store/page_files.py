"""Files of pages: consecutive pages of one sequence, with the data needed to check them.

A file has one uint8 tensor [n, page_bytes] per group of layers, named ``pages.0``, ``pages.1``, ...
The layout of a page is in ``octavo.kernels.page_bytes``. Metadata:

    octavo      "pages 3": this format
    model       fingerprint of the model
    context     other settings on which K and V depend
    page_size   positions per page
    formats     JSON, per group: [k_format, v_format]
    states      JSON: [[name, shape, dtype], ...] of recurrent states, which are one more tensor
    layers      JSON, per group: [[num_kv_heads, head_dim, value_dim, window, keep], ...]
    indices     JSON, per tensor: ascending indices of its pages
    parent      digest of the page before the first page, hexadecimal
    token_ids   JSON: page_size token ids per page
    media       JSON: [[start, length, digest], ...] of images; "octavo" is then "pages 4"
    salt        hexadecimal; absent if unknown
    checksum    SHA-256 over the other metadata (JSON, keys sorted) and the pages

Source of the file format: https://huggingface.co/docs/safetensors. Files are not mapped,
because reading a truncated mapped file ends the process with SIGBUS.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from io import BufferedIOBase
from itertools import pairwise
from pathlib import Path

import numpy as np

from octavo.block_manager import Digest, MediaSpan
from octavo.kernels.interface import LayerSpec, PoolSpec
from octavo.kernels.page_bytes import PageBytes

from .page_runs import MEDIA_VERSION, VERSION, PageLayoutKey, PagePart, PageRun, StateKind

SUFFIX = ".safetensors"
ALIGNMENT = 64  # bytes
_MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)
"""Exceptions for a malformed file."""


class BadPages(Exception):
    """An unusable file.

    torn      the file is incomplete
    altered   the file is complete, but its checksum does not match
    foreign   another program or version wrote the file
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def write_run(path: Path, run: PageRun) -> None:
    """Write pages to a new file. Raises OSError. Not atomic: write under a temporary name, then rename."""
    with path.open("xb") as file:
        file.writelines(pack_run(run))


def pack_run(run: PageRun) -> list[bytes | memoryview]:
    metadata = run.kind.metadata() | {
        "indices": json.dumps([part.indices for part in run.parts]),
        "parent": run.parent.hex(),
        "token_ids": json.dumps(run.token_ids),
    }
    if run.salt is not None:
        metadata["salt"] = run.salt.hex()
    if run.media:
        media = [[span.start, span.length, span.digest.hex()] for span in run.media]
        metadata |= {"octavo": MEDIA_VERSION, "media": json.dumps(media)}
    parts = [np.ascontiguousarray(part.pages) for part in run.parts]
    metadata["checksum"] = _checksum(metadata, parts)
    header: dict[str, object] = {"__metadata__": metadata}
    start = 0
    for group, pages in enumerate(parts):
        stop = start + pages.nbytes
        header[_tensor(group)] = {"dtype": "U8", "shape": pages.shape, "data_offsets": (start, stop)}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return [len(text).to_bytes(8, "little"), text, *(pages.data for pages in parts)]


def _tensor(group: int) -> str:
    return f"pages.{group}"


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_run(path: Path) -> PageRun:
    """Read and check a file. Raises OSError if it cannot be read, and BadPages if it is invalid."""
    with path.open("rb") as file:
        return unpack_run(file, os.fstat(file.fileno()).st_size, str(path))


def unpack_run(file: BufferedIOBase, size: int, name: str) -> PageRun:
    """Read and check a file of ``size`` bytes. Raises BadPages."""
    try:
        metadata, parts = _read(file, size)
    except _MALFORMED as error:
        raise BadPages("torn", f"{name} is not a complete file of pages: {error!r}") from None
    if metadata.get("octavo") != (MEDIA_VERSION if "media" in metadata else VERSION):
        raise BadPages(
            "foreign", f"{name} has another format version than this server's ({VERSION}); save it again"
        )
    if metadata.get("checksum") != _checksum(metadata, parts):
        raise BadPages("altered", f"{name} has changed since it was written: its checksum does not match")
    try:
        return _parse(metadata, parts)
    except _MALFORMED as error:
        raise BadPages("foreign", f"{name} has an invalid description of its pages: {error}") from None


def only_page(
    run: PageRun, kind: PageLayoutKey, parent: Digest, token_ids: tuple[int, ...], name: str
) -> PageBytes:
    """Return the page of a run with a single page, as bytes [page_bytes]. Raises BadPages."""
    if not run.kind.matches(kind) or run.parts[0].indices != (0,):
        raise BadPages("foreign", f"{name} holds pages of another model or page format")
    if run.parent != parent or run.token_ids != token_ids:
        raise BadPages("altered", f"{name} holds a page of other tokens")
    page: PageBytes = run.parts[0].pages[0]
    return page


def _read(file: BufferedIOBase, size: int) -> tuple[dict[str, str], list[PageBytes]]:
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= size - 8:
        raise ValueError(f"its header claims {length} bytes, but the file has {size}")
    header = json.loads(file.read(length))
    metadata: dict[str, str] = header.pop("__metadata__")
    num_bytes, start = size - 8 - length, 0
    data = np.empty(num_bytes, np.uint8)
    if (num_read := file.readinto(data.data)) != num_bytes:
        raise ValueError(f"only {num_read} of {num_bytes} bytes of pages could be read")
    parts = []
    for group in range(len(header)):
        tensor = header[_tensor(group)]
        num_pages, page_bytes = tensor["shape"]
        stop = start + num_pages * page_bytes
        if tensor["dtype"] != "U8" or tensor["data_offsets"] != [start, stop] or min(tensor["shape"]) < 0:
            raise ValueError(f"its pages {tensor} do not begin at {start}")
        parts.append(data[start:stop].reshape(num_pages, page_bytes))
        start = stop
    if start != num_bytes:
        raise ValueError(f"its pages take {start} bytes, but {num_bytes} are stored")
    return dict(metadata), parts


def _parse(metadata: Mapping[str, str], parts: Sequence[PageBytes]) -> PageRun:
    states: tuple[StateKind, ...] = ()
    pages_of_groups = list(parts)
    if "states" in metadata:
        nbytes = pages_of_groups.pop().shape[1]
        states = (StateKind(int(metadata["page_size"]), _entries(metadata["states"]), nbytes),)
    specs = tuple(
        PoolSpec(
            layers=tuple(
                LayerSpec(
                    num_kv_heads=heads,
                    head_dim=dim,
                    value_dim=value_dim,
                    window=window,
                    keep=keep,
                    chunked=bool(chunked),
                )
                for heads, dim, value_dim, window, keep, *chunked in layers
            ),
            num_pages=len(pages),
            page_size=int(metadata["page_size"]),
            k_format=k_format,
            v_format=v_format,
        )
        for layers, (k_format, v_format), pages in zip(
            json.loads(metadata["layers"]), json.loads(metadata["formats"]), pages_of_groups, strict=True
        )
    )
    salt = metadata.get("salt")
    run = PageRun(
        PageLayoutKey(metadata["model"], specs, metadata["context"], states),
        Digest(bytes.fromhex(metadata["parent"])),
        tuple(json.loads(metadata["token_ids"])),
        tuple(
            PagePart(tuple(indices), pages)
            for indices, pages in zip(json.loads(metadata["indices"]), parts, strict=True)
        ),
        None if salt is None else bytes.fromhex(salt),
        tuple(
            MediaSpan(int(start), int(length), bytes.fromhex(digest))
            for start, length, digest in json.loads(metadata.get("media", "[]"))
        ),
    )
    if len(run.token_ids) != run.num_pages * run.kind.page_size:
        raise ValueError(f"{len(run.token_ids)} tokens do not fill pages of {run.kind.page_size}")
    for page_bytes, part in zip(run.kind.part_bytes, run.parts, strict=True):
        _check_part(run, page_bytes, part)
    return run


def _entries(text: str) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    return tuple((str(name), tuple(map(int, shape)), str(dtype)) for name, shape, dtype in json.loads(text))


def _check_part(run: PageRun, page_bytes: int, part: PagePart) -> None:
    if part.pages.shape != (len(part.indices), page_bytes):
        raise ValueError(f"pages must have shape {(len(part.indices), page_bytes)}, got {part.pages.shape}")
    rising = all(a < b for a, b in pairwise((-1, *part.indices, run.num_pages)))
    if not rising:
        raise ValueError(f"indices {part.indices} do not rise below {run.num_pages}")


def _checksum(metadata: Mapping[str, str], parts: Sequence[PageBytes]) -> str:
    described = {key: value for key, value in metadata.items() if key != "checksum"}
    checksum = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for pages in parts:
        checksum.update(pages.data)
    return checksum.hexdigest()
