"""Pages in Mooncake's store: a master knows the pages, and each server lends memory for them.

Mooncake cannot list pages. A server asks which of a prompt's pages exist when the prompt arrives.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from octavo.block_manager import Digest

from ..api.errors import InvalidConfig
from ..api.size import parse_size
from .remote_store import unusable, without_secrets

TIMEOUT_S = 1.0
BUFFER_BYTES = 64 * 1024**2  # bytes: pages on their way to and from the store
_ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "1000", "MC_RPC_CONNECT_TIMEOUT_MS": "1000", "MC_LOG_LEVEL": "ERROR",
    "MC_STORE_CLIENT_METRIC": "0",
}  # fmt: skip
_FULL = (-200, -600)  # no segment, or no buffer, has enough free bytes
_OPTIONS = {"segment": "1GiB", "host": "", "protocol": "tcp", "device": ""}


class MooncakeStore:
    def __init__(self, url: str) -> None:
        host, port, options = _parse(url)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise InvalidConfig(
                "remote_cache needs the package mooncake and libibverbs for mooncake://; run "
                f"pip install '.[mooncake]' and see docs/guides/remote-cache.md ({error})"
            ) from error
        try:  # because setup would try for 90 s and hold Python's lock meanwhile
            with socket.create_connection((host, port), TIMEOUT_S) as probe:
                own_host = options["host"] or probe.getsockname()[0]
        except OSError as error:
            raise unusable(url, "Mooncake master", error) from error
        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup(
            own_host,
            "P2PHANDSHAKE",
            parse_size(options["segment"], least=0),
            BUFFER_BYTES,
            options["protocol"],
            options["device"],
            f"{host}:{port}",
        )
        if code:
            raise unusable(url, "Mooncake master", f"setup failed with {code}")
        self._used = 0

    def get(self, kind: str, digest: Digest) -> bytes | None:
        key = _key(kind, digest)
        data: bytes = self._store.get(key)
        if not data:
            _checked(self._store.is_exist(key))  # an existing page without bytes was on a server that is gone
        return data or None

    def put(self, kind: str, digest: Digest, data: bytes) -> None:
        _checked(self._store.put(_key(kind, digest), data))
        self._used += len(data)

    def delete(self, kind: str, digest: Digest) -> None:
        _checked(self._store.remove(_key(kind, digest), True))

    def touch(self, kinds: Sequence[str], digest: Digest) -> None:
        pass

    def find(self, kind: str, digests: Sequence[Digest]) -> list[Digest]:
        codes = self._store.batch_is_exist([_key(kind, digest) for digest in digests] or [f"octavo:{kind}"])
        found = [bool(_checked(code)) for code in codes]
        return [digest for digest, exists in zip(digests, found, strict=False) if exists]

    def used_bytes(self) -> int:
        return self._used

    def close(self) -> None:
        self._store.close()


def mooncake_tenant_key(url: str) -> bytes | None:
    _parse(url)
    secret = urlsplit(url).password
    if not secret:
        return None
    return hmac.digest(unquote(secret).encode(), b"octavo:tenant_key", hashlib.sha256)


def _parse(url: str) -> tuple[str, int, dict[str, str]]:
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        port = parts.port
    except ValueError:
        port, options = None, {}
    if port is None or not parts.hostname or parts.path or not options.keys() <= _OPTIONS.keys():
        raise InvalidConfig(
            "remote_cache must be mooncake://[:SECRET@]HOST:PORT with the options segment, host, protocol "
            f"and device, as in mooncake://10.0.0.1:50051?segment=8GiB, got {without_secrets(url)!r}"
        )
    return parts.hostname, port, _OPTIONS | options


def _key(kind: str, digest: Digest) -> str:
    return f"octavo:{kind}:{digest.hex()}"


def _checked(code: int) -> int:
    if code in _FULL:
        raise OSError(errno.ENOSPC, f"Mooncake has no memory for a page ({code})")
    if code < 0:
        raise OSError(f"Mooncake failed with {code}")
    return code
