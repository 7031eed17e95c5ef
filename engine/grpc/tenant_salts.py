"""Secret salts that separate the cached pages of tenants.

Page digests are visible to watchers and on disk. The secret key keeps digests from revealing prompts.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from ..api.errors import InvalidConfig

KEY_FILE = ".tenant_key"
KEY_BYTES = 32


class TenantSalts:
    """Salts of tenants, derived from one key."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(KEY_BYTES)

    def of(self, tenant: str) -> bytes:
        """Return a tenant's salt: HMAC-SHA-256 of its name, or b"" without a tenant."""
        if not tenant:
            return b""
        return hmac.digest(self._key, b"octavo tenant\0" + tenant.encode(), hashlib.sha256)


def load_tenant_salts(folder: Path | None) -> TenantSalts:
    """Load or create the key in a folder (None: temporary key). Raises InvalidConfig for an unusable file."""
    if folder is None:
        return TenantSalts()
    path = folder / KEY_FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make_key(path)
        key = path.read_bytes()
    except OSError as error:
        raise InvalidConfig(
            f"the key of tenants' cache salts, {path}, cannot be used: {error.strerror or error}; give a "
            "--cache-dir (or --save-dir) that this process may write"
        ) from error
    if len(key) != KEY_BYTES:
        raise InvalidConfig(
            f"the key of tenants' cache salts, {path}, must have {KEY_BYTES} bytes, got {len(key)}; remove "
            "it to get a new key, with which tenants' pages on disk can no longer be found"
        )
    return TenantSalts(key)


def _make_key(path: Path) -> None:
    unfinished = path.with_name(f"{KEY_FILE}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
    finally:
        unfinished.unlink()
