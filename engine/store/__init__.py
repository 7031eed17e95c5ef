"""Pages on disk: a cache that survives restarts, and prompts saved by name. No MLX; see README.md."""
