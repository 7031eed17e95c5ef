"""Index of the shards in a folder, which is read without access to the disk."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

KIND = re.compile(r"[0-9a-f]{32}")
SHARD = re.compile(r"([0-9a-f]{64})\.safetensors")
SETTLED_NS = 2 * 10**9  # ns: a folder unchanged for this long is not read again

_Part = tuple[Path, str]  # (folder of a kind, first two digits)


class ShardIndex:
    """Names of shards, updated by writers and by ``refresh`` for other processes. It may be out of date, so
    readers must handle missing shards."""

    def __init__(self, root: Path, own: Sequence[Path]) -> None:
        """Read the index. ``own``: folders of this server's kinds of pages, by group."""
        self._root = root
        self._own = list(own)
        self._lock = threading.Lock()
        self._parts: dict[_Part, set[str]] = {}
        self._others: list[Path] = []  # folders of other kinds of pages
        self._read_ns: dict[_Part, int] = {}  # time of the folder's last change, at its last read
        self._changes: dict[
            tuple[Path, str], bool
        ] = {}  # shards added (True) or removed since a refresh began
        self._doubted: set[tuple[Path, str]] = set()

    def has(self, name: str, group: int) -> bool:
        folder = self._own[group]
        return name in self._parts.get((folder, name[:2]), ()) and (folder, name) not in self._doubted

    def has_of_other_kind(self, name: str) -> bool:
        return any(name in self._parts.get((kind, name[:2]), ()) for kind in self._others)

    def add(self, name: str, group: int) -> None:
        """Note that a shard was written."""
        folder = self._own[group]
        with self._lock:
            self._parts.setdefault((folder, name[:2]), set()).add(name)
            self._changes[folder, name] = True
            self._doubted.discard((folder, name))

    def discard(self, name: str, folder: Path) -> None:
        """Note that a shard does not exist any more."""
        with self._lock:
            self._parts.get((folder, name[:2]), set()).discard(name)
            self._changes[folder, name] = False
            self._doubted.discard((folder, name))

    def doubt(self, names: Sequence[str], group: int) -> None:
        """Treat shards that may be damaged as missing until they are written again."""
        folder = self._own[group]
        with self._lock:
            there = (name for name in names if name in self._parts.get((folder, name[:2]), ()))
            self._doubted.update((folder, name) for name in there)

    def refresh(self) -> None:
        """Read the folders that have changed. Takes as long as the disk does, so steps must not call it."""
        with self._lock:
            self._changes.clear()
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
        names = {match[1] for entry in entries(folder) if (match := SHARD.fullmatch(entry.name))}
        with self._lock:
            for (where, name), added in self._changes.items():
                if where == kind and name[:2] == folder.name:
                    (names.add if added else names.discard)(name)
            self._parts[part] = names
        if is_settled:
            self._read_ns[part] = changed_ns


def _folders(path: Path) -> list[Path]:
    return [Path(entry.path) for entry in entries(path) if is_folder(entry)]


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder and not a link; False if the disk cannot tell."""
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def entries(path: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; none if it cannot be read."""
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError:
        return []
