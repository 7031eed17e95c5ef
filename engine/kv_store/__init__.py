"""Pages on disk: a cache that survives restarts. No MLX; see README.md."""
