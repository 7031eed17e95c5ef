"""Names for the contents of pages: a chain of hashes over the tokens up to each page's end."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Tokens

from octavo.block_manager.types import Digest

TOKEN_BYTES = 4

Hasher = Callable[[Digest, bytes, int], list[Digest]]
"""``hasher(parent, packed, page_bytes)``: digests of consecutive pages, each of which depends
on its parent's and on its own tokens; one call per run of pages, because calls cost more
than hashing.

A digest stands for the contents: a page is found by it alone, and tokens are not compared again.
So two prefixes must never share one. With SHA-256 that takes 2**128 tries, also of somebody who
chooses prompts to that end; a short or a fast hash would let such a caller read a page of
others. Whatever gives fewer than ``MIN_DIGEST_BYTES`` is refused."""

MIN_DIGEST_BYTES = 32


def check_strength(hasher: Hasher) -> None:
    """ValueError if the digests are too short to stand for contents unconfirmed."""
    (digest,) = hasher(root(b""), bytes(TOKEN_BYTES), TOKEN_BYTES)
    if len(digest) < MIN_DIGEST_BYTES:
        raise ValueError(
            f"the hasher's digests must have at least {MIN_DIGEST_BYTES} bytes, got {len(digest)}: a hit is "
            "not compared with the tokens, so two prefixes of one digest would share their K/V; use SHA-256"
        )


def sha256_chain(parent: Digest, packed: bytes, page_bytes: int) -> list[Digest]:
    """``digest[i] = SHA-256(digest[i - 1] || tokens of page i)``, starting from ``parent``.

    packed       token ids of whole pages as from ``pack``; ``page_bytes`` of them per page
    """
    sha256, digests = hashlib.sha256, []
    digest: bytes = parent
    for start in range(0, len(packed), page_bytes):
        digest = sha256(digest + packed[start : start + page_bytes]).digest()
        digests.append(Digest(digest))
    return digests


def root(salt: bytes) -> Digest:
    """The parent of a sequence's first page: pages of different salts never share a digest."""
    return Digest(hashlib.sha256(b"octavo pages\0" + salt).digest())


def pack(tokens: Tokens[int]) -> bytes:
    """Token ids as little-endian uint32, on any machine; OverflowError outside that range."""
    words = array("I", tokens)
    assert words.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def split(packed: bytes, page_size: int) -> list[bytes]:
    """Packed tokens of whole pages, by page."""
    page_bytes = page_size * TOKEN_BYTES
    return [packed[start : start + page_bytes] for start in range(0, len(packed), page_bytes)]


def unpack(packed: bytes) -> list[int]:
    """The token ids that ``pack`` was given."""
    words = array("I", packed)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tolist()
