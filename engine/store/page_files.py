"""Pages in a file: consecutive pages of one sequence, with all it takes to trust them again.

A ``.safetensors`` file with one tensor, ``pages`` uint8 [n, page_bytes], laid out as in
``octavo.kernels.page_bytes``. What they are is in the metadata:

    octavo      "pages 1": this format
    model       fingerprint of the model that computed them
    page_size, k_format, v_format
    layers      JSON: [[num_kv_heads, head_dim, value_dim, window, keep], ...]
    parent      digest of the page before the first one, hexadecimal
    token_ids   JSON: page_size ids for each page
    salt        hexadecimal; absent where only the parent's digest is known
    checksum    SHA-256 over the other metadata (JSON, keys sorted) and the pages

so that a file that was cut, overwritten or edited is told from one that was not. The format of
the file is https://huggingface.co/docs/safetensors; it is written and mapped here because the
library keeps Python's other threads waiting while it does.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from octavo.block_manager import Digest
from octavo.kernels.interface import LayerSpec, PoolSpec
from octavo.kernels.page_bytes import PageBytes

VERSION = "pages 1"
SUFFIX = ".safetensors"
ALIGNMENT = 64  # of the pages in the file


class BadPages(Exception):
    """A file that cannot be used. ``reason`` is a label for counting:

    torn      not whole
    altered   whole, but not what was written
    foreign   written by something else, or a version that this one does not read
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PageKind:
    """What makes the pages of two engines interchangeable.

    model   fingerprint of the model
    spec    of the pool; how many pages it has does not matter
    """

    model: str
    spec: PoolSpec

    def matches(self, other: PageKind) -> bool:
        """Whether pages of one can be put into a pool of the other as they are."""
        return self.model == other.model and replace(self.spec, num_pages=1) == replace(
            other.spec, num_pages=1
        )

    def describe(self) -> str:
        """Format and page size, for people."""
        spec = self.spec
        name = spec.k_format if spec.k_format == spec.v_format else f"{spec.k_format}/{spec.v_format}"
        return f"{name} pages of {spec.page_size} tokens"

    def metadata(self) -> dict[str, str]:
        spec = self.spec
        layers = [[y.num_kv_heads, y.head_dim, y.value_dim, y.window, y.keep] for y in spec.layers]
        return {
            "octavo": VERSION,
            "model": self.model,
            "page_size": str(spec.page_size),
            "k_format": spec.k_format,
            "v_format": spec.v_format,
            "layers": json.dumps(layers),
        }

    @property
    def key(self) -> str:
        """A name for folders: 32 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.metadata(), sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive full pages of one sequence.

    parent      digest of the page before the first one; at a sequence's start the salt's root
    token_ids   of the pages' positions
    pages       [n, page_bytes]
    salt        None where it is not known
    """

    kind: PageKind
    parent: Digest
    token_ids: tuple[int, ...]
    pages: PageBytes
    salt: bytes | None = None


def write_run(path: Path, run: PageRun) -> None:
    """Write a file that is not there yet; OSError if that fails. It is not whole before this returns:
    write it under another name and rename it."""
    metadata = run.kind.metadata() | {"parent": run.parent.hex(), "token_ids": json.dumps(run.token_ids)}
    if run.salt is not None:
        metadata["salt"] = run.salt.hex()
    pages = np.ascontiguousarray(run.pages)
    metadata["checksum"] = _checksum(metadata, pages)
    tensor = {"dtype": "U8", "shape": pages.shape, "data_offsets": (0, pages.nbytes)}
    header = json.dumps({"__metadata__": metadata, "pages": tensor}).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        file.write(pages.data)


def sync(path: Path) -> None:
    """Return when a file's or folder's contents are on the medium."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_run(path: Path) -> PageRun:
    """Read a file and check all of it. The pages are mapped, copied, and the copy is checked, so
    that nothing can change them afterwards. Raises OSError if it cannot be read, and BadPages."""
    try:
        with path.open("rb") as file:
            metadata, pages = _read(file)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadPages("torn", f"{path} is no whole file of pages: {error!r}") from None
    if metadata.get("octavo") != VERSION:
        raise BadPages(
            "foreign", f"{path} does not hold pages as this version writes them ({VERSION}); save it again"
        )
    if metadata.get("checksum") != _checksum(metadata, pages):
        raise BadPages("altered", f"{path} has changed since it was written: its checksum does not match")
    try:
        return _parse(metadata, pages)
    except (ValueError, TypeError, KeyError) as error:  # written by another program
        raise BadPages("foreign", f"{path} does not describe its pages: {error}") from None


def _read(file: BinaryIO) -> tuple[dict[str, str], PageBytes]:
    """Metadata and pages; ValueError, TypeError, KeyError or AttributeError for what is not whole."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= size - 8:
        raise ValueError(f"its header claims {length} bytes of {size}")
    header = json.loads(file.read(length))
    tensor = header["pages"]
    num_pages, page_bytes = tensor["shape"]
    num_bytes = size - 8 - length
    fills = tensor["data_offsets"] == [0, num_bytes] and 0 < num_pages * page_bytes == num_bytes
    if tensor["dtype"] != "U8" or not fills:
        raise ValueError(f"its pages {tensor} do not fill {num_bytes} bytes")
    metadata: dict[str, str] = header["__metadata__"]
    mapped = np.memmap(file, np.uint8, "r", offset=8 + length, shape=(num_pages, page_bytes))
    return dict(metadata), np.array(mapped)


def _parse(metadata: Mapping[str, str], pages: PageBytes) -> PageRun:
    """ValueError, TypeError or KeyError for what does not fit together."""
    spec = PoolSpec(
        layers=tuple(
            LayerSpec(num_kv_heads=heads, head_dim=dim, value_dim=value_dim, window=window, keep=keep)
            for heads, dim, value_dim, window, keep in json.loads(metadata["layers"])
        ),
        num_pages=len(pages),
        page_size=int(metadata["page_size"]),
        k_format=metadata["k_format"],
        v_format=metadata["v_format"],
    )
    token_ids = tuple(json.loads(metadata["token_ids"]))
    if pages.dtype != np.uint8 or pages.shape != (spec.num_pages, spec.page_bytes):
        raise ValueError(f"{pages.dtype} {pages.shape} are not pages of {spec.page_bytes} bytes")
    if len(token_ids) != spec.num_pages * spec.page_size:
        raise ValueError(f"{len(token_ids)} tokens do not fill {spec.num_pages} pages of {spec.page_size}")
    salt = metadata.get("salt")
    return PageRun(
        PageKind(metadata["model"], spec),
        Digest(bytes.fromhex(metadata["parent"])),
        token_ids,
        pages,
        None if salt is None else bytes.fromhex(salt),
    )


def _checksum(metadata: Mapping[str, str], pages: PageBytes) -> str:
    described = {key: value for key, value in metadata.items() if key != "checksum"}
    checksum = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    checksum.update(pages.data)
    return checksum.hexdigest()
