from __future__ import annotations

from octavo.block_manager import BlockManager, MediaSpan
from octavo.engine.kv_store.page_runs import chains

IMAGE = MediaSpan(3, 4, bytes(32))


def test_chains_have_the_images_of_their_pages() -> None:
    blocks = BlockManager(20, 2)
    blocks.keep_tokens()
    tokens = list(range(9))
    for media in ((), (IMAGE,)):
        table = blocks.open(tokens, media=media)
        assert blocks.reserve(table, len(tokens))
        blocks.commit(table, tokens, len(tokens))
        blocks.close(table)
    found = sorted(chains(blocks.cached_contents(), 2, page_size=2), key=lambda chain: len(chain.media))
    assert sum(len(chain.digests) for chain in found) == 4 + 3
    assert all(chain.parent is None for chain in found if chain.tokens[0] == 0)
    spans = [(chain.tokens[0], span) for chain in found for span in chain.media]
    assert spans
    assert {span._replace(start=span.start + first) for first, span in spans} == {IMAGE}
