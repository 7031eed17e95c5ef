"""Paged attention and quantize-and-write as Metal kernels, compiled by MLX as they are needed."""
