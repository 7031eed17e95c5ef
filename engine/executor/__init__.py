"""Running a model: all code that uses MLX arrays or mlx-lm models."""
