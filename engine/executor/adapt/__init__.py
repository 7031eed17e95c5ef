"""Adaptation of an mlx-lm model to paged attention: its cache objects, its attention, its output head."""
