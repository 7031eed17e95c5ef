"""A folder of shards: one page each, named by its digest, so that the folder is its own index.

    FOLDER/<kind of pages>/<first two digits>/<digest>.safetensors

Each group of layers has pages of its own kind, and so have snapshots of recurrent state.

Several servers can use one folder: what is kept in memory about it (``ShardIndex``) only tells where
to look. A shard is written under another name and renamed, it never changes afterwards, and it goes by
being removed, which whoever is reading it does not notice.
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

STALE_S = 600.0  # a file that is being written is not older than this
KEPT_SHARE = 0.9  # of the budget, after shards were removed: so it does not happen at every write
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True, slots=True)
class _File:
    used_ns: int
    num_bytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class Pruned:
    """What ``prune`` removed, and what is left."""

    num_removed: int
    num_bytes: int


class ShardFolder:
    """Shards of one model's pages, in a folder whose budget of bytes counts all kinds together."""

    def __init__(self, root: Path, kind: PageLayoutKey, *, max_bytes: int) -> None:
        """Raises OSError if the folder cannot be made."""
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
        """Whether there is such a shard, as far as is known; asks no disk."""
        return self._index.has(digest.hex(), group)

    def has_of_other_kind(self, digest: Digest) -> bool:
        """Whether there is a page of these tokens that another model, or another page format, made, as far
        as is known; asks no disk."""
        return self._index.has_of_other_kind(digest.hex())

    def doubt(self, digests: Sequence[Digest], group: int) -> None:
        """``has`` is false for these until they are written again: a page beside them is damaged."""
        self._index.doubt([digest.hex() for digest in digests], group)

    def refresh(self) -> None:
        """Learn what other processes have written and removed. Takes as long as the disk does."""
        self._index.refresh()

    def put(self, digest: Digest, run: PageRun, group: int = 0) -> int:
        """Write the shard of one page of a group, whose kind the run has; returns its bytes. OSError if it
        cannot be written.

        Not synced: a crash of the machine may lose or tear what was written last, which reading
        finds out. The end of the process, however sudden, loses only what was not written.
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
        """The bytes [page_bytes] of the page of these tokens.

        Raises FileNotFoundError if there is none, OSError if it cannot be read, and BadPages if it
        is not what it should be: then it is removed.
        """
        path = self.path(digest, group)
        try:
            run = read_run(path)
            if not run.kind.matches(self._kinds[group]) or run.parts[0].indices != (0,):
                raise BadPages("foreign", f"{path} holds other pages than this server's")
            if run.parent != parent or run.token_ids != token_ids:
                raise BadPages("altered", f"{path} holds the page of other tokens")
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
        """It was used just now, in every group; nothing happens where it is gone."""
        for group in range(len(self._folders)):
            with contextlib.suppress(OSError):
                os.utime(self.path(digest, group))

    def prune(self, *, is_full: bool = False) -> Pruned:
        """Count all shards; if they take more than the budget, remove those used longest ago. Files
        that were being written when a process ended go, too. What is no shard is left alone.

        is_full   the disk took no more: what is there is all that it has room for
        """
        files = sorted(self._scan(), key=lambda file: file.used_ns)
        total, removed = sum(file.num_bytes for file in files), 0
        budget = min(total, self.max_bytes) if is_full else self.max_bytes
        if total > budget or is_full:
            for file in files:
                if total <= budget * KEPT_SHARE:
                    break
                with contextlib.suppress(OSError):  # somebody else was quicker
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
