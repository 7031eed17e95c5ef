"""A folder of shards. A shard is a file with one page, named by the page's digest.

    FOLDER/<kind of pages>/<first two digits>/<digest>.safetensors

Several servers can share a folder. The index in memory (``ShardIndex``) may be out of date.
A shard is written under a temporary name, then renamed, and never changes afterwards.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.block_manager import Digest
from octavo.kernels.page_bytes import PageBytes

from .page_files import SUFFIX, BadPages, only_page, read_run, write_run
from .page_runs import PageLayoutKey, PageRun

KIND = re.compile(r"[0-9a-f]{32}")
SHARD = re.compile(r"([0-9a-f]{64})\.safetensors")
SETTLED_NS = 2 * 10**9  # a folder that changed more recently is read again

_Part = tuple[Path, str]


class ShardIndex:
    """Index of the shards' names. Other processes may have removed a shard."""

    def __init__(self, root: Path, own: Sequence[Path]) -> None:
        self._root = root
        self._own = list(own)
        self._lock = threading.Lock()
        self._parts: dict[_Part, set[str]] = {}
        self._others: list[Path] = []
        self._read_ns: dict[_Part, int] = {}
        self._to_recheck: set[tuple[Path, str]] = set()

    def has(self, name: str, group: int) -> bool:
        folder = self._own[group]
        return name in self._parts.get((folder, name[:2]), ()) and (folder, name) not in self._to_recheck

    def has_of_other_kind(self, name: str) -> bool:
        return any(name in self._parts.get((kind, name[:2]), ()) for kind in self._others)

    def add(self, name: str, group: int) -> None:
        folder = self._own[group]
        with self._lock:
            self._parts.setdefault((folder, name[:2]), set()).add(name)
            self._to_recheck.discard((folder, name))

    def discard(self, name: str, folder: Path) -> None:
        with self._lock:
            self._parts.get((folder, name[:2]), set()).discard(name)
            self._to_recheck.discard((folder, name))

    def recheck(self, names: Sequence[str], group: int) -> None:
        folder = self._own[group]
        with self._lock:
            there = (name for name in names if name in self._parts.get((folder, name[:2]), ()))
            self._to_recheck.update((folder, name) for name in there)

    def refresh(self) -> None:
        """Read the folders that have changed. May be slow."""
        kinds = [path for path in _folders(self._root) if KIND.fullmatch(path.name)]
        for kind in kinds:
            for part in _folders(kind):
                self._refresh(kind, part)
        self._others = [kind for kind in kinds if kind not in self._own]

    def _refresh(self, kind: Path, folder: Path) -> None:
        part = (kind, folder.name)
        try:
            changed_ns = folder.stat().st_mtime_ns
        except OSError:
            return
        if self._read_ns.get(part) == changed_ns:
            return
        is_settled = time.time_ns() - changed_ns > SETTLED_NS
        with self._lock:  # so that no shard is added or removed meanwhile
            found = entries(folder)
            self._parts[part] = {match[1] for each in found if (match := SHARD.fullmatch(each.name))}
        if is_settled:
            self._read_ns[part] = changed_ns


def _folders(path: Path) -> list[Path]:
    return [Path(entry.path) for entry in entries(path) if is_folder(entry)]


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError:
        return []


STALE_S = 600.0  # older unfinished files are removed
PRUNE_TO = 0.9
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True, slots=True)
class _File:
    used_ns: int
    num_bytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class Pruned:
    num_removed: int
    num_bytes: int


class ShardFolder:
    """Reader and writer of one model's pages. All shards share one budget of bytes."""

    place = "the cache folder"
    refresh_s = 5.0  # seconds between searches for pages of other servers

    def __init__(self, root: Path, kind: PageLayoutKey, *, max_bytes: int) -> None:
        """Open the folder, creating it if needed. Raises OSError if that fails."""
        self.kind = kind
        self.max_bytes = max_bytes
        self._root = root
        self._kinds = [kind.group(index) for index in range(len(kind.part_bytes))]
        self._folders = [root / own.key for own in self._kinds]
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in self._folders:
            folder.mkdir(mode=0o700, exist_ok=True)
        self._index = ShardIndex(root, self._folders)
        self._index.refresh()

    def path(self, digest: Digest, group: int = 0) -> Path:
        name = digest.hex()
        return self._folders[group] / name[:2] / f"{name}{SUFFIX}"

    def has(self, digest: Digest, group: int = 0) -> bool:
        """Whether the index has the shard. Does not access the disk."""
        return self._index.has(digest.hex(), group)

    def has_of_other_kind(self, digest: Digest) -> bool:
        return self._index.has_of_other_kind(digest.hex())

    def recheck(self, digests: Sequence[Digest], group: int) -> None:
        self._index.recheck([digest.hex() for digest in digests], group)

    def refresh(self) -> None:
        self._index.refresh()

    def put(self, digest: Digest, run: PageRun, group: int = 0) -> int:
        """Write the shard of one page; return its size in bytes. Raises OSError.

        The file is not synced: a crash of the machine may damage it, and ``get`` detects the damage.
        """
        path = self.path(digest, group)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.parent / f".{digest.hex()}.{secrets.token_hex(8)}.tmp"
        try:
            write_run(unfinished, run)
            num_bytes = unfinished.stat().st_size
            unfinished.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        self._index.add(digest.hex(), group)
        return num_bytes

    def get(self, digest: Digest, *, parent: Digest, token_ids: tuple[int, ...], group: int = 0) -> PageBytes:
        """Return the bytes [page_bytes] of a page.

        Raises FileNotFoundError if there is no shard, and OSError if it cannot be read.
        Removes an invalid shard and raises BadPages.
        """
        path = self.path(digest, group)
        try:
            page = only_page(read_run(path), self._kinds[group], parent, token_ids, str(path))
        except BadPages:
            self._index.discard(digest.hex(), self._folders[group])
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        except OSError:
            self._index.discard(digest.hex(), self._folders[group])
            raise
        self.touch(digest)
        return page

    def touch(self, digest: Digest) -> None:
        for group in range(len(self._folders)):
            with contextlib.suppress(OSError):
                os.utime(self.path(digest, group))

    def prune(self, *, is_full: bool = False) -> Pruned:
        """Remove the least recently used shards until the rest fits the budget."""
        files = sorted(self._scan(), key=lambda file: file.used_ns)
        total, removed = sum(file.num_bytes for file in files), 0
        budget = min(total, self.max_bytes) if is_full else self.max_bytes
        if total > budget or is_full:
            for file in files:
                if total <= budget * PRUNE_TO:
                    break
                with contextlib.suppress(OSError):  # another process has removed it
                    file.path.unlink()
                    removed += 1
                self._index.discard(file.path.stem, file.path.parent.parent)
                total -= file.num_bytes
        return Pruned(removed, total)

    def _scan(self) -> Iterator[_File]:
        for kind in filter(is_folder, entries(self._root)):
            if not KIND.fullmatch(kind.name):
                continue
            for part in filter(is_folder, entries(Path(kind.path))):
                for entry in entries(Path(part.path)):
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        if SHARD.fullmatch(entry.name):
                            yield _File(status.st_mtime_ns, status.st_size, Path(entry.path))
                        elif _UNFINISHED.fullmatch(entry.name) and time.time() - status.st_mtime > STALE_S:
                            Path(entry.path).unlink()
