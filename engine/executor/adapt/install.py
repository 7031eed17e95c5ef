"""Changes to model modules of mlx-lm that serving through pages needs, in one call."""

from __future__ import annotations

from .block_sparse import install_block_sparse
from .cache_adapter import install_hook
from .chunk_masks import install_chunks
from .module_names import install_names
from .softcap import install_softcap
from .sparse_latents import install_sparse_latents


def adapt_models() -> None:
    """Change those modules of mlx-lm that are imported; what was changed before stays as it is."""
    install_hook()
    install_softcap()
    install_chunks()
    install_sparse_latents()
    install_block_sparse()
    install_names()
