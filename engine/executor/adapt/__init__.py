"""Adaptation of mlx-lm models to paged attention."""
