"""How a model of mlx-lm meets paged attention: its cache objects, its attention, its output head."""
