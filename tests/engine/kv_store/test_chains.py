from __future__ import annotations

from octavo.block_manager import BlockManager, MediaSpan
from octavo.engine.kv_store.page_runs import chains


def test_pages_with_images_and_those_behind_are_left_out() -> None:
    blocks = BlockManager(20, 2)
    blocks.keep_tokens()
    tokens = list(range(9))
    for media in ((), (MediaSpan(3, 2, bytes(32)),)):
        table = blocks.open(tokens, media=media)
        assert blocks.reserve(table, len(tokens))
        blocks.commit(table, tokens, len(tokens))
        blocks.close(table)
    (chain, *others) = chains(blocks.cached_contents(), 100, page_size=2)
    assert not others
    assert chain.tokens == tuple(range(8))
    assert list(chain.digests) == blocks.page_digests(tokens, [])
