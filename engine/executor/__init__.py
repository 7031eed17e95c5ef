"""Running a model: all code that works with MLX arrays or mlx-lm models."""
