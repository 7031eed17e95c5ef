"""Interface to the programs that keep pages for several machines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from octavo.block_manager import Digest

from ..api.errors import InvalidConfig

KEY_BYTES = 32


class RemoteStore(Protocol):
    """Pages by kind and digest. Used on threads that may wait; all methods raise OSError if it fails."""

    def get(self, kind: str, digest: Digest) -> bytes | None: ...

    def put(self, kind: str, digest: Digest, data: bytes) -> None: ...

    def delete(self, kind: str, digest: Digest) -> None: ...

    def touch(self, kinds: Sequence[str], digest: Digest) -> None: ...

    def find(self, kind: str, digests: Sequence[Digest]) -> list[Digest]:
        """Return the pages of ``digests`` that exist, or all pages written since the last call."""
        ...

    def used_bytes(self) -> int: ...

    def close(self) -> None: ...


def without_secrets(url: str) -> str:
    return re.sub(r"//[^/]*@", "//...@", url)


def unusable(url: str, what: str, error: object) -> InvalidConfig:
    return InvalidConfig(
        f"remote_cache must be a {what} that responds, got {without_secrets(url)!r} ({error}); start it, or "
        "leave remote_cache out"
    )
