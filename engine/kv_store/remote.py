"""Pages in a Redis or Valkey server that several machines share.

    octavo:<kind of pages>:<digest>   one page, in the file format of page_files.py
    octavo:<kind of pages>:written    stream of the digests of written pages
    octavo:tenant_key                 key of the tenants' salts

Only pages expire, so that a server with ``maxmemory-policy volatile-lru`` evicts nothing else.
"""

from __future__ import annotations

import io
import logging
import re
import secrets
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from octavo.block_manager import Digest
from octavo.kernels.page_bytes import PageBytes

from ..api.errors import InvalidConfig
from .folder import Pruned, ShardFolder
from .page_files import BadPages, only_page, pack_run, unpack_run
from .page_runs import PageLayoutKey, PageRun

logger = logging.getLogger(__name__)

TIMEOUT_S = 1.0
RECENT_S = 7 * 24 * 3600  # seconds: a page expires this long after its last use
MAX_NAMES = 2**18  # digests in the index of one group of layers
READ_AT_ONCE = 10_000  # stream entries per command
KEY_BYTES = 32


def connect(url: str) -> Any:
    """Return a client. Raises InvalidConfig if the package is missing or the URL is wrong."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise InvalidConfig("remote_cache needs the package redis; run pip install '.[redis]'") from error
    # Retry once, because the server may have closed an idle connection.
    retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    try:
        return redis.Redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=retry
        )
    except ValueError as error:
        raise InvalidConfig(
            f"remote_cache must be redis://HOST:PORT, rediss://HOST:PORT or unix://PATH, got {_shown(url)!r}"
        ) from error


@contextmanager
def _as_os_error() -> Iterator[None]:
    from redis.exceptions import RedisError

    try:
        yield
    except RedisError as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def shared_tenant_key(url: str) -> bytes:
    """Return the common key for tenants' salts of all servers at ``url``. Raises InvalidConfig."""
    client = connect(url)
    try:
        with _as_os_error():
            client.set("octavo:tenant_key", secrets.token_bytes(KEY_BYTES), nx=True)
            key = client.get("octavo:tenant_key")
    except OSError as error:
        raise _unusable(url, error) from error
    finally:
        client.close()
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise InvalidConfig(
            f"octavo:tenant_key at {_shown(url)!r} must have {KEY_BYTES} bytes; delete it to get a new key, "
            "with which tenants' cached pages can no longer be found"
        )
    return key


def _shown(url: str) -> str:
    return re.sub(r"//[^/]*@", "//...@", url)  # without user and password


def _unusable(url: str, error: OSError) -> InvalidConfig:
    return InvalidConfig(
        f"remote_cache must be a Redis server that responds, got {_shown(url)!r} ({error}); start it, or "
        "leave remote_cache out"
    )


class RemoteShards:
    """Reads and writes one model's pages on a server. Used in place of ``ShardFolder``.

    ``has`` reads an index in memory. After a failed command all pages count as missing until ``refresh``
    reaches the server.
    """

    place = "the remote cache"
    refresh_s = 0.5  # seconds between reads of new digests
    max_bytes = sys.maxsize  # the server has its own limit

    def __init__(self, url: str, kind: PageLayoutKey) -> None:
        """Connect and read the index. Raises InvalidConfig if the server does not respond."""
        self.kind = kind
        self._client = connect(url)
        self._kinds = [kind.group(index) for index in range(len(kind.part_bytes))]
        self._names: list[dict[bytes, None]] = [{} for _ in self._kinds]
        self._read_to: list[bytes | str] = ["0" for _ in self._kinds]
        self._lock = threading.Lock()
        self._is_down = False
        try:
            self._read_streams()
        except OSError as error:
            raise _unusable(url, error) from error

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
            self._read_streams()
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
            pipe = self._client.pipeline()  # a transaction, so that the stream only lists stored pages
            pipe.set(self._key(digest, group), data, ex=RECENT_S)
            pipe.xadd(self._stream(group), {"page": digest}, maxlen=MAX_NAMES)
            pipe.execute()
        self._add(group, [digest])
        return len(data)

    def get(self, digest: Digest, *, parent: Digest, token_ids: tuple[int, ...], group: int = 0) -> PageBytes:
        key = self._key(digest, group)
        with self._command():
            data = self._client.getex(key, ex=RECENT_S)
        if data is None:
            self.recheck([digest], group)
            raise FileNotFoundError(key)
        try:
            run = unpack_run(io.BytesIO(data), len(data), key)
            return only_page(run, self._kinds[group], parent, token_ids, key)
        except BadPages:
            self.recheck([digest], group)
            with suppress(OSError), self._command():
                self._client.delete(key)
            raise

    def touch(self, digest: Digest) -> None:
        if not self._is_down:
            with suppress(OSError), self._command():
                for group in range(len(self._kinds)):
                    self._client.expire(self._key(digest, group), RECENT_S)

    def prune(self, *, is_full: bool = False) -> Pruned:  # noqa: ARG002
        """Return the bytes of the stored pages. The server itself evicts pages."""
        try:
            with self._command():
                return Pruned(0, int(self._client.info("memory")["used_memory"]))
        except (OSError, LookupError):
            return Pruned(0, 0)

    def _key(self, digest: Digest, group: int) -> str:
        return f"octavo:{self._kinds[group].key}:{digest.hex()}"

    def _stream(self, group: int) -> str:
        return f"octavo:{self._kinds[group].key}:written"

    @contextmanager
    def _command(self) -> Iterator[None]:
        try:
            with _as_os_error():
                yield
        except OSError as error:
            with self._lock:
                was_down, self._is_down = self._is_down, True
            if not was_down:
                logger.warning(
                    "the remote cache does not respond; pages are computed until it does: %s", error
                )
            raise

    def _read_streams(self) -> None:
        for group in range(len(self._kinds)):
            name = self._stream(group)
            while True:
                with self._command():
                    found = self._client.xread({name: self._read_to[group]}, count=READ_AT_ONCE)
                if not found:
                    break
                entries = found[0][1] if isinstance(found, list) else found[name.encode()][0]
                self._read_to[group] = entries[-1][0]
                self._add(group, [Digest(fields[b"page"]) for _, fields in entries])

    def _add(self, group: int, digests: Sequence[Digest]) -> None:
        with self._lock:
            names = self._names[group]
            names.update(dict.fromkeys(digests))
            while len(names) > MAX_NAMES:
                del names[next(iter(names))]


Shards = ShardFolder | RemoteShards
"""Storage of a ``DiskTier``."""
