"""Memory of a model, its pages and its workspace. Does not import MLX."""
