"""All changes to mlx-lm's model modules that serving through pages needs."""

from __future__ import annotations

from .block_sparse import install_block_sparse
from .cache_adapter import install_hook
from .chunk_masks import install_chunks
from .module_names import install_names
from .softcap import install_softcap
from .sparse_latents import install_sparse_latents


def adapt_models() -> None:
    """Change the imported modules of mlx-lm; modules changed before stay as they are."""
    install_hook()
    install_softcap()
    install_chunks()
    install_sparse_latents()
    install_block_sparse()
    install_names()
