"""Which page holds which position of which sequence. Standard library only; see README.md."""

from octavo.block_manager.digests import Hasher, sha256_chain
from octavo.block_manager.manager import BlockManager
from octavo.block_manager.types import Digest, Fork, PageCopy, PageId, PageTable

__all__ = [
    "BlockManager",
    "Digest",
    "Fork",
    "Hasher",
    "PageCopy",
    "PageId",
    "PageTable",
    "sha256_chain",
]
