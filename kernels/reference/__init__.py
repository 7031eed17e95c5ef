"""The reference backend: slow, short and right, in MLX operations."""
