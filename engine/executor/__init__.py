"""Running a model: everything that operates on MLX arrays or on mlx-lm models lives here."""
