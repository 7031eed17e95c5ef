"""The reference backend: slow, short and correct, in MLX operations."""
