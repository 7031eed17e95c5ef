"""Division of cached pages into runs of consecutive pages, one run per saved file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.block_manager import Digest, PageContents
from octavo.block_manager.digests import media_in, unpack


@dataclass(frozen=True, slots=True)
class Chain:
    """Pages ``[first, first + len(digests))`` of a sequence; no other chain branches off at an inner page.

    parent    digest of the page before the first one; None at a sequence's start
    tokens    tokens of these pages
    """

    digests: tuple[Digest, ...]
    parent: Digest | None
    tokens: tuple[int, ...]
    salt: bytes


def chains(entries: Mapping[Digest, PageContents], max_pages: int, *, page_size: int) -> list[Chain]:
    """Return all pages whose whole prefix is in ``entries`` once, as chains of at most ``max_pages``. Earlier
    pages of a sequence come first. Pages with images and later ones are left out, because a file of pages is
    named by tokens alone."""
    children: dict[Digest | None, list[Digest]] = {}
    for digest, entry in entries.items():
        if not media_in(entry.tokens, page_size):
            children.setdefault(entry.parent, []).append(digest)
    found: list[Chain] = []
    todo = list(children.get(None, ()))
    while todo:
        digests = [todo.pop()]
        following = children.get(digests[-1], [])
        while len(following) == 1 and len(digests) < max_pages:
            digests += following
            following = children.get(digests[-1], [])
        first = entries[digests[0]]
        tokens = tuple(token for digest in digests for token in unpack(entries[digest].tokens))
        found.append(Chain(tuple(digests), first.parent, tokens, first.salt))
        todo += following
    return found
