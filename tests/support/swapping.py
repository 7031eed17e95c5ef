from __future__ import annotations

import time

import pytest

from octavo.block_manager import BlockManager, Digest
from octavo.engine.kv_store.prefetch import PrefetchJob, Rate
from octavo.engine.kv_store.shard_store import ShardStore
from octavo.scheduler import Sequence


def wait_for_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted pages go to disk, and reading is assumed to take no time."""
    offload = ShardStore.offload

    def patient(self: ShardStore, sequence: Sequence, token_s: float | None) -> None:
        offload(self, sequence, token_s)
        end = time.monotonic() + 60
        while self._writer._num_queued:
            assert time.monotonic() < end, "nothing is written"
            time.sleep(0.001)

    monkeypatch.setattr(ShardStore, "offload", patient)
    monkeypatch.setattr(Rate, "seconds", lambda self, num_bytes: 0.0)  # noqa: ARG005


def prefetch_job(
    blocks: BlockManager, digests: list[Digest], known: list[list[bool]], found: int
) -> PrefetchJob:
    """Return the job of a prompt of which the pool knows these pages of each group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "page_digests", lambda *_, **__: digests)
        patch.setattr(
            blocks, "find", lambda digest, group: 0 if known[group][digests.index(digest)] else None
        )
        patch.setattr(blocks, "num_findable", lambda _: found)
        return PrefetchJob(Sequence("loaded", [1], 1), blocks)
