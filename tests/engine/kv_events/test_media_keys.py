from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from octavo.block_manager import BlockManager, MediaSpan
from octavo.engine.grpc.vllm.kv_events import KvEventStream
from octavo.engine.kv_events.zmq_publisher import _structure

IMAGE = MediaSpan(3, 3, bytes(range(32)))
TOKENS = [1, 2, 3, 9, 9, 9, 7, 8, 5]  # pages of 4 tokens: both have rows of the image


def test_pages_name_their_images_in_events() -> None:
    blocks = BlockManager(8, 4)
    blocks.keep_tokens()
    table = blocks.open(TOKENS, salt=b"s", media=(IMAGE,))
    assert blocks.reserve(table, len(TOKENS))
    blocks.commit(table, TOKENS, len(TOKENS))
    (event,) = blocks.events.since(1)
    name, fields = _structure(event, 4, {})
    assert (name, fields["token_ids"]) == ("BlockStored", TOKENS[:8])
    assert fields["extra_keys"] == [["s", [IMAGE.digest.hex(), 3]], [[IMAGE.digest.hex(), -1]]]
    stream: Any = SimpleNamespace(_page_size=4)
    found = [KvEventStream._block(stream, *each) for each in zip(event.digests, event.contents, strict=True)]
    assert [list(block.token_ids) for block in found] == [TOKENS[:4], TOKENS[4:8]]
    keys = [(key.multimodal.identifier, key.multimodal.offset) for block in found for key in block.extra_keys]
    assert keys == [(IMAGE.digest.hex(), 3), (IMAGE.digest.hex(), -1)]
    blocks.close(table)


def test_text_has_no_extra_keys() -> None:
    blocks = BlockManager(8, 4)
    blocks.keep_tokens()
    table = blocks.open(TOKENS)
    assert blocks.reserve(table, len(TOKENS))
    blocks.commit(table, TOKENS, len(TOKENS))
    (event,) = blocks.events.since(1)
    assert _structure(event, 4, {})[1]["extra_keys"] is None
    blocks.close(table)
