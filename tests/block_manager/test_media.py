from __future__ import annotations

import hashlib
import struct

import pytest

from octavo.block_manager import BlockManager, Digest, MediaSpan
from octavo.block_manager.digests import media_in, pack, page_contents, root, sha256_chain

CAT, DOG = (MediaSpan(5, 6, bytes([letter]) * 32) for letter in b"cd")
TOKENS = [1, 2, 3, 4, 5, *[9] * 6, *range(20, 30)]  # pages of 4 tokens: the image has rows in pages 1 and 2


def serve(blocks: BlockManager, media: tuple[MediaSpan, ...], *, salt: bytes = b"") -> int:
    table = blocks.open(TOKENS, salt=salt, media=media)
    cached = table.num_written
    assert blocks.reserve(table, len(TOKENS))
    blocks.commit(table, TOKENS, len(TOKENS))
    blocks.close(table)
    blocks.check()
    return cached


def test_the_same_image_is_found_and_another_is_not() -> None:
    blocks = BlockManager(20, 4)
    assert serve(blocks, (CAT,)) == 0
    assert serve(blocks, (CAT,)) == 20
    assert serve(blocks, (DOG,)) == 4  # the page before the image
    assert serve(blocks, ()) == 4
    assert serve(blocks, (DOG,)) == 20
    assert serve(blocks, (CAT._replace(start=4),)) == 4  # the image is at another position


def test_pages_are_named_by_tokens_and_media_as_documented() -> None:
    digests: list[Digest] = []
    BlockManager(20, 4).page_digests(TOKENS, digests, media=(CAT,))
    parent: bytes = root(b"")
    for page, starts in enumerate(((), (1,), (-3,), (), ())):
        keys = b"".join(CAT.digest + struct.pack("<ii", start, CAT.length) for start in starts)
        parent = hashlib.sha256(parent + pack(TOKENS[4 * page : 4 * page + 4]) + keys).digest()
        assert digests[page] == parent
    contents = page_contents(TOKENS, 0, 5, page_size=4, media=(CAT,))
    found = [media_in(each, 4) for each in contents]
    assert found == [[], [CAT._replace(start=1)], [CAT._replace(start=-3)], [], []]


def test_digests_that_grow_with_generated_tokens_stay_equal() -> None:
    blocks, grown, at_once = BlockManager(20, 4), list[Digest](), list[Digest]()
    for length in (6, 9, 13, 21):
        blocks.page_digests(TOKENS[:length], grown, media=(CAT,))
    assert grown == blocks.page_digests(TOKENS, at_once, media=(CAT,))
    assert at_once[:1] == sha256_chain(root(b""), pack(TOKENS[:4]), 16)


@pytest.mark.parametrize(("media", "reason"), [((CAT._replace(start=1),), "new"), ((), "other_salt")])
def test_a_first_page_of_another_image_is_no_other_salt(media: tuple[MediaSpan, ...], reason: str) -> None:
    blocks = BlockManager(20, 4)
    serve(blocks, media, salt=b"one")
    media = tuple(span._replace(digest=DOG.digest) for span in media)
    table = blocks.open(TOKENS, salt=b"two", media=media)
    assert blocks.explain_miss(table, TOKENS).reason == reason
    blocks.close(table)


def test_an_image_follows_its_sequence_into_a_fork() -> None:
    blocks = BlockManager(20, 4)
    table = blocks.open(TOKENS, media=(CAT,))
    assert blocks.reserve(table, len(TOKENS))
    blocks.commit(table, TOKENS, 7)
    fork = blocks.fork(table)
    assert fork is not None
    assert blocks.reserve(fork, len(TOKENS))
    blocks.commit(fork, TOKENS, len(TOKENS))
    blocks.take_copies()
    assert fork.digests == blocks.page_digests(TOKENS, [], media=(CAT,))
