"""Fingerprint of a model, so that its K and V are never used for another model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from octavo.kernels.cpus import available_threads

from ..memory.weight_files import weight_files

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 * 1024**2
MAX_THREADS = 8

Stamp = list[int]
"""Size, inode, mtime and ctime of a file."""


def model_fingerprint(path: Path, *, weights: str, exact: bool, remembered: Path | None = None) -> str:
    """Return a hexadecimal SHA-256 over ``config.json`` and every byte of every weight file."""
    remembered = _default_memory() if remembered is None else remembered
    total = hashlib.sha256(f"octavo model 2\0{weights}\0{exact}\0".encode())
    total.update((path / "config.json").read_bytes())
    digests = _Digests(remembered)
    for file in weight_files(path):
        total.update(digests.of(file))
    digests.save()
    return total.hexdigest()


def _default_memory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "octavo" / "weight_digests.json"


class _Digests:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, tuple[Stamp, str]] = {}
        self._has_changed = False
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            for name, (stamp, digest) in json.loads(path.read_bytes()).items():
                self._known[str(name)] = (list(stamp), str(digest))

    def of(self, file: Path) -> bytes:
        name, stamp = str(file.resolve()), _stamp(file)
        known = self._known.get(name)
        if known is not None and known[0] == stamp:
            return known[1].encode()
        digest = _hash_file(file)
        if _stamp(file) == stamp:
            self._known[name] = (stamp, digest)
            self._has_changed = True
        return digest.encode()

    def save(self) -> None:
        if not self._has_changed:
            return
        unfinished = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.tmp")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                json.dump(self._known, stream)
            unfinished.replace(self._path)
        except OSError as error:
            logger.info(
                "the hash of the weights cannot be stored and is computed again at the next start: %s", error
            )
            with contextlib.suppress(OSError):
                unfinished.unlink()


def _stamp(file: Path) -> Stamp:
    status = file.stat()
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _hash_file(file: Path) -> str:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size

        def hash_chunk(start: int) -> bytes:
            digest, stop = hashlib.blake2b(digest_size=32), min(start + CHUNK_BYTES, size)
            while start < stop and (part := os.pread(descriptor, stop - start, start)):
                digest.update(part)
                start += len(part)
            return digest.digest()

        with ThreadPoolExecutor(min(MAX_THREADS, available_threads())) as pool:
            chunks = pool.map(hash_chunk, range(0, size, CHUNK_BYTES))
            return hashlib.sha256(b"".join(chunks)).hexdigest()
    finally:
        os.close(descriptor)
