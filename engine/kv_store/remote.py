"""Pages in a store that several machines share, in the file format of ``page_files.py``."""

from __future__ import annotations

import errno
import io
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from octavo.block_manager import Digest
from octavo.kernels.page_bytes import PageBytes

from .folder import Pruned, ShardFolder
from .mooncake_store import MooncakeStore, mooncake_tenant_key
from .page_files import BadPages, only_page, pack_run, unpack_run
from .page_runs import PageLayoutKey, PageRun
from .redis_store import MAX_NAMES, RedisStore, redis_tenant_key
from .remote_store import RemoteStore, unusable

logger = logging.getLogger(__name__)

_MOONCAKE = "mooncake:"


def connect(url: str) -> RemoteStore:
    return MooncakeStore(url) if url.startswith(_MOONCAKE) else RedisStore(url)


def shared_tenant_key(url: str) -> bytes | None:
    """Return the common key of all servers for tenants' salts, or None if each server has its own."""
    return mooncake_tenant_key(url) if url.startswith(_MOONCAKE) else redis_tenant_key(url)


class RemoteShards:
    """Reads and writes one model's pages in a store. Used in place of ``ShardFolder``.

    ``has`` reads an index in memory, which ``ask`` and ``refresh`` bring up to date. After a failed command
    all pages count as missing until ``refresh`` reaches the store.
    """

    place = "the remote cache"
    refresh_s = 0.5  # seconds between reads of new digests
    max_bytes = sys.maxsize  # the store has its own limit

    def __init__(self, url: str, kind: PageLayoutKey) -> None:
        """Connect and read the index. Raises InvalidConfig if the store does not respond."""
        self.kind = kind
        self._store = connect(url)
        self._kinds = [kind.group(index) for index in range(len(kind.part_bytes))]
        self._keys = [each.key for each in self._kinds]
        self._names: list[dict[bytes, None]] = [{} for _ in self._kinds]
        self._lock, self._finding = threading.Lock(), threading.Lock()
        self._is_down = False
        try:
            self.ask(())
        except OSError as error:
            raise unusable(url, "store", error) from error

    @property
    def is_down(self) -> bool:
        return self._is_down

    def ask(self, digests: Sequence[Digest]) -> None:
        """Bring the index up to date for these pages. Raises OSError if the store does not respond."""
        for group, key in enumerate(self._keys):
            with self._finding:
                with self._command():
                    found = self._store.find(key, digests)
                self._add(group, found)

    def has(self, digest: Digest, group: int = 0) -> bool:
        return digest in self._names[group] and not self._is_down

    def has_of_other_kind(self, digest: Digest) -> bool:  # noqa: ARG002
        return False

    def recheck(self, digests: Sequence[Digest], group: int) -> None:
        with self._lock:
            for digest in digests:
                self._names[group].pop(digest, None)

    def refresh(self) -> None:
        try:
            self.ask(())
        except OSError:
            return
        if self._is_down:
            self._is_down = False
            logger.warning("the remote cache responds again")

    def put(self, digest: Digest, run: PageRun, group: int = 0) -> int:
        if self._is_down:
            raise OSError("the remote cache does not respond")
        data = b"".join(pack_run(run))
        with self._command():
            self._store.put(self._keys[group], digest, data)
        self._add(group, [digest])
        return len(data)

    def get(self, digest: Digest, *, parent: Digest, token_ids: tuple[int, ...], group: int = 0) -> PageBytes:
        name = f"octavo:{self._keys[group]}:{digest.hex()}"
        with self._command():
            data = self._store.get(self._keys[group], digest)
        if data is None:
            self.recheck([digest], group)
            raise FileNotFoundError(name)
        try:
            run = unpack_run(io.BytesIO(data), len(data), name)
            return only_page(run, self._kinds[group], parent, token_ids, name)
        except BadPages:
            self.recheck([digest], group)
            with suppress(OSError), self._command():
                self._store.delete(self._keys[group], digest)
            raise

    def touch(self, digest: Digest) -> None:
        if not self._is_down:
            with suppress(OSError), self._command():
                self._store.touch(self._keys, digest)

    def prune(self, *, is_full: bool = False) -> Pruned:  # noqa: ARG002
        """Return the bytes of the stored pages. The store itself evicts pages."""
        try:
            with self._command():
                return Pruned(0, self._store.used_bytes())
        except (OSError, LookupError):
            return Pruned(0, 0)

    def close(self) -> None:
        self._is_down = True
        self._store.close()

    @contextmanager
    def _command(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            with self._lock:
                was_down, self._is_down = self._is_down, True
            if not was_down:
                logger.warning(
                    "the remote cache does not respond; pages are computed until it does: %s", error
                )
            raise

    def _add(self, group: int, digests: Sequence[Digest]) -> None:
        with self._lock:
            names = self._names[group]
            names.update(dict.fromkeys(digests))
            while len(names) > MAX_NAMES:
                del names[next(iter(names))]


Shards = ShardFolder | RemoteShards
"""Storage of a ``ShardStore``."""
