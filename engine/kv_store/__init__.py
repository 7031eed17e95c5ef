"""Pages on disk: a cache that survives restarts. Does not import MLX."""
