"""A folder of shards: one page each, named by its digest, so that the folder is its own index.

    FOLDER/<kind of pages>/<first two digits>/<digest>.safetensors

Each group of layers has pages of its own kind, and so have snapshots of recurrent state.

Several servers can share a folder, so the index in memory (``ShardIndex``) is only a hint. A shard is written
under a temporary name and renamed. It never changes afterwards, and removing it does not disturb its readers.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.block_manager import Digest
from octavo.kernels.page_bytes import PageBytes

from .page_files import SUFFIX, BadPages, read_run, write_run
from .page_runs import PageLayoutKey, PageRun
from .shard_index import KIND, SHARD, ShardIndex, entries, is_folder

STALE_S = 600.0  # seconds: older temporary files were abandoned
KEPT_SHARE = 0.9  # share of the budget left after pruning, so that not every write prunes
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True, slots=True)
class _File:
    used_ns: int
    num_bytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class Pruned:
    """Numbers of removed and remaining shards."""

    num_removed: int
    num_bytes: int


class ShardFolder:
    """Shards of one model's pages, in a folder with one budget of bytes for all kinds of pages."""

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
        """Whether the index has such a shard; does not access the disk."""
        return self._index.has(digest.hex(), group)

    def has_of_other_kind(self, digest: Digest) -> bool:
        """Whether the index has a page of these tokens in another format or of another model; does not access
        the disk."""
        return self._index.has_of_other_kind(digest.hex())

    def doubt(self, digests: Sequence[Digest], group: int) -> None:
        """Treat these shards as missing until they are written again, because a page next to them is
        damaged."""
        self._index.doubt([digest.hex() for digest in digests], group)

    def refresh(self) -> None:
        """Update the index with changes of other processes. Takes as long as the disk does."""
        self._index.refresh()

    def put(self, digest: Digest, run: PageRun, group: int = 0) -> int:
        """Write the shard of one page of a group, whose kind the run has; return its bytes. Raises OSError if
        it cannot be written.

        The file is not synced. A crash of the machine may lose or damage the latest shards, which reading
        detects. A sudden end of the process loses only unwritten pages.
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
        """Return the bytes [page_bytes] of the page of these tokens.

        Raises FileNotFoundError if there is none, OSError if it cannot be read, and BadPages, after removing
        it, if it is invalid.
        """
        path = self.path(digest, group)
        try:
            run = read_run(path)
            if not run.kind.matches(self._kinds[group]) or run.parts[0].indices != (0,):
                raise BadPages("foreign", f"{path} holds pages of another model or page format")
            if run.parent != parent or run.token_ids != token_ids:
                raise BadPages("altered", f"{path} holds a page of other tokens")
        except BadPages:
            self._index.discard(digest.hex(), self._folders[group])
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        except OSError:
            self._index.discard(digest.hex(), self._folders[group])
            raise
        self.touch(digest)
        page: PageBytes = run.parts[0].pages[0]
        return page

    def touch(self, digest: Digest) -> None:
        """Note a use of the page in every group; missing shards are ignored."""
        for group in range(len(self._folders)):
            with contextlib.suppress(OSError):
                os.utime(self.path(digest, group))

    def prune(self, *, is_full: bool = False) -> Pruned:
        """Count all shards; beyond the budget, remove those used longest ago. Abandoned temporary files are
        removed, too. Other files are left alone.

        is_full   the disk is full: the present shards are all that fit
        """
        files = sorted(self._scan(), key=lambda file: file.used_ns)
        total, removed = sum(file.num_bytes for file in files), 0
        budget = min(total, self.max_bytes) if is_full else self.max_bytes
        if total > budget or is_full:
            for file in files:
                if total <= budget * KEPT_SHARE:
                    break
                with contextlib.suppress(OSError):  # another process was faster
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
