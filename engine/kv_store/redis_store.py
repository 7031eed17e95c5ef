"""Pages in a Redis or Valkey server.

    octavo:<kind of pages>:<digest>   one page
    octavo:<kind of pages>:written    stream of the digests of written pages
    octavo:tenant_key                 key of the tenants' salts

Only pages expire, so that a server with ``maxmemory-policy volatile-lru`` evicts nothing else.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from octavo.block_manager import Digest

from ..api.errors import InvalidConfig
from .remote_store import KEY_BYTES, unusable, without_secrets

TIMEOUT_S = 1.0
RECENT_S = 7 * 24 * 3600  # seconds: a page expires this long after its last use
MAX_NAMES = 2**18  # digests in one stream
READ_AT_ONCE = 10_000  # stream entries per command
_TENANT_KEY = "octavo:tenant_key"


class RedisStore:
    def __init__(self, url: str) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise InvalidConfig("remote_cache needs the package redis; run pip install '.[redis]'") from error
        # Retry once, because the server may have closed an idle connection.
        retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=retry
            )
        except ValueError as error:
            raise InvalidConfig(
                "remote_cache must be redis://HOST:PORT, rediss://HOST:PORT, unix://PATH or "
                f"mooncake://HOST:PORT, got {without_secrets(url)!r}"
            ) from error
        self._read_to: dict[str, bytes] = {}

    def get(self, kind: str, digest: Digest) -> bytes | None:
        with _as_os_error():
            data: bytes | None = self._client.getex(_key(kind, digest), ex=RECENT_S)
        return data

    def put(self, kind: str, digest: Digest, data: bytes) -> None:
        with _as_os_error():
            pipe = self._client.pipeline()  # a transaction, so that the stream only lists stored pages
            pipe.set(_key(kind, digest), data, ex=RECENT_S)
            pipe.xadd(_stream(kind), {"page": digest}, maxlen=MAX_NAMES)
            pipe.execute()

    def delete(self, kind: str, digest: Digest) -> None:
        with _as_os_error():
            self._client.delete(_key(kind, digest))

    def touch(self, kinds: Sequence[str], digest: Digest) -> None:
        with _as_os_error():
            for kind in kinds:
                self._client.expire(_key(kind, digest), RECENT_S)

    def find(self, kind: str, digests: Sequence[Digest]) -> list[Digest]:  # noqa: ARG002
        name, written, read_to = _stream(kind), list[Digest](), self._read_to.get(kind, b"0")
        while True:
            with _as_os_error():
                found = self._client.xread({name: read_to}, count=READ_AT_ONCE)
            if not found:
                self._read_to[kind] = read_to
                return written
            entries = found[0][1] if isinstance(found, list) else found[name.encode()][0]
            read_to = entries[-1][0]
            written += [Digest(fields[b"page"]) for _, fields in entries]

    def used_bytes(self) -> int:
        with _as_os_error():
            return int(self._client.info("memory")["used_memory"])

    def close(self) -> None:
        self._client.close()

    def common_key(self) -> object:
        with _as_os_error():
            self._client.set(_TENANT_KEY, secrets.token_bytes(KEY_BYTES), nx=True)
            return self._client.get(_TENANT_KEY)


def redis_tenant_key(url: str) -> bytes:
    with closing(RedisStore(url)) as store:
        try:
            key = store.common_key()
        except OSError as error:
            raise unusable(url, "Redis server", error) from error
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise InvalidConfig(
            f"{_TENANT_KEY} at {without_secrets(url)!r} must have {KEY_BYTES} bytes; delete it to get a new "
            "key, with which tenants' cached pages can no longer be found"
        )
    return key


def _key(kind: str, digest: Digest) -> str:
    return f"octavo:{kind}:{digest.hex()}"


def _stream(kind: str) -> str:
    return f"octavo:{kind}:written"


@contextmanager
def _as_os_error() -> Iterator[None]:
    from redis.exceptions import RedisError

    try:
        yield
    except RedisError as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
