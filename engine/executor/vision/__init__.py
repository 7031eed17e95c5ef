"""Vision models: mlx-vlm computes image features, which become rows of mlx-lm's language model."""
