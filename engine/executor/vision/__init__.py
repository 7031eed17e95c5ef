"""Vision models: features of images by mlx-vlm, as rows of the language model that mlx-lm's file computes."""
