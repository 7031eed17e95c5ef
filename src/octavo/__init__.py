"""Octavo: a paged-attention LLM serving engine on MLX."""

__version__ = "0.1.0"
