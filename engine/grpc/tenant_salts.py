"""Salts that keep tenants' cached pages apart: one per tenant, which no other tenant can compute.

A page's digest, which watchers see and files on disk are named by, is made from the tokens and the
salt. If the salt could be computed from the tenant's name, whoever sees a digest could try prompts until
one fits. So salts are made with a random key. It lies beside the pages that outlive the server, for they
are only found again under the same salts.
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
    """Salts of fixed length made with one key; without one, with a new random key."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(KEY_BYTES)

    def of(self, tenant: str) -> bytes:
        """Return the prefix of a tenant's salts: HMAC-SHA-256 of its name; b"" for no tenant."""
        if not tenant:
            return b""
        return hmac.digest(self._key, b"octavo tenant\0" + tenant.encode(), hashlib.sha256)


def load_tenant_salts(folder: Path | None) -> TenantSalts:
    """Salts by the key in a folder, which is made, readable by this user alone, if there is none; without
    a folder, by a key of this process. InvalidConfig if the file cannot be used."""
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
            f"the key of tenants' cache salts, {path}, has {len(key)} bytes and must have {KEY_BYTES}; "
            "remove it to get a new one: tenants' pages that are kept there are then not found any more"
        )
    return TenantSalts(key)


def _make_key(path: Path) -> None:
    """Write a new key whole under another name first: several servers may begin with one folder at once,
    and all take the key of the first."""
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
