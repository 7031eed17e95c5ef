"""Vision models: mlx-vlm computes image features for mlx-lm's language model."""
