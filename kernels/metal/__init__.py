"""Paged attention and quantize-and-write as Metal kernels, compiled by MLX on demand."""
