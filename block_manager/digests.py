"""Page digests: a hash of all tokens up to the page's end."""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections import abc
from functools import lru_cache
from typing import cast

from .types import Digest, MediaSpan

TOKEN_BYTES = 4
_PLACE = struct.Struct("<ii")
NO_MEDIA: tuple[MediaSpan, ...] = ()

DIGEST_BYTES = 32


def sha256_chain(parent: Digest, packed: bytes, page_bytes: int) -> list[Digest]:
    """Return one digest per page: ``SHA-256(previous digest || tokens of the page)``.

    Pages are found by digest alone, and tokens are not compared again. So two prefixes must never share a
    digest, even if an attacker chooses the prompts.
    """
    sha256, digests = hashlib.sha256, []
    digest: bytes = parent
    if len(packed) == page_bytes:
        return [Digest(sha256(digest + packed).digest())]
    for (page,) in struct.iter_unpack(f"{page_bytes}s", packed):
        digest = sha256(digest + page).digest()
        digests.append(digest)
    return cast("list[Digest]", digests)


@lru_cache(maxsize=1024)
def root(salt: bytes) -> Digest:
    """Return the digest that precedes a sequence's first page; it depends on the salt."""
    return Digest(hashlib.sha256(b"octavo pages\0" + salt).digest())


def pack(tokens: abc.Sequence[int]) -> bytes:
    """Return token ids as little-endian uint32.

    Raises OverflowError for a token id that does not fit into uint32.
    """
    words = array("I")
    assert words.itemsize == TOKEN_BYTES
    words.fromlist(tokens if isinstance(tokens, list) else list(tokens))
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def split(packed: bytes, page_size: int) -> list[bytes]:
    page_bytes = page_size * TOKEN_BYTES
    return [packed[start : start + page_bytes] for start in range(0, len(packed), page_bytes)]


def page_contents(
    tokens: abc.Sequence[int],
    first: int,
    last: int,
    *,
    page_size: int,
    media: abc.Sequence[MediaSpan] = NO_MEDIA,
) -> list[bytes]:
    """Return the bytes to hash for each of the pages ``[first, last)``, without the parent digest.

    The bytes are the packed tokens, then digest, start and length of each image in the page.
    """
    pages = split(pack(tokens[first * page_size : last * page_size]), page_size)
    for span in media:
        for page in range(max(first, span.start // page_size), min(last, -(-span.stop // page_size))):
            pages[page - first] += span.digest + _PLACE.pack(span.start - page * page_size, span.length)
    return pages


def extend_chain(
    digests: list[Digest],
    tokens: abc.Sequence[int],
    num_pages: int,
    *,
    salt: bytes,
    page_size: int,
    media: abc.Sequence[MediaSpan] = NO_MEDIA,
) -> None:
    """Append missing digests until ``digests`` covers the first ``num_pages`` pages."""
    known = len(digests)
    if any(span.stop > known * page_size for span in media):
        for contents in page_contents(tokens, known, num_pages, page_size=page_size, media=media):
            digests += sha256_chain(digests[-1] if digests else root(salt), contents, len(contents))
    elif known < num_pages:
        packed = pack(tokens[known * page_size : num_pages * page_size])
        digests += sha256_chain(digests[-1] if known else root(salt), packed, page_size * TOKEN_BYTES)
        assert len(digests) == num_pages, f"{len(digests)} digests for {num_pages} pages"


def media_in(contents: bytes, page_size: int) -> list[MediaSpan]:
    """Return the images in a page. Their starts are relative to the page."""
    found = struct.iter_unpack(f"<{DIGEST_BYTES}sii", contents[page_size * TOKEN_BYTES :])
    return [MediaSpan(start, length, digest) for digest, start, length in found]


def tokens_in(contents: bytes, page_size: int) -> list[int]:
    return unpack(contents[: page_size * TOKEN_BYTES])


def unpack(packed: bytes) -> list[int]:
    words = array("I", packed)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tolist()
