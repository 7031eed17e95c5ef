from __future__ import annotations

from octavo.block_manager import Digest, PageId
from octavo_lab.policies.lfu import LFU


def test_pages_with_hits_outlive_pages_without() -> None:
    policy, digests = LFU(4), [Digest(bytes([page])) for page in range(4)]
    policy.release([PageId(0)], digests)
    policy.reuse([PageId(0)])
    policy.release([PageId(0)], digests)
    policy.release([PageId(3), PageId(2), PageId(1)], digests)
    assert policy.evict(3) == [3, 2, 1]
