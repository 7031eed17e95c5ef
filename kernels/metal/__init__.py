"""Metal kernels, compiled by MLX on demand."""
