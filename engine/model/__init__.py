"""The model side: finding, loading, hooking and probing any mlx-lm architecture."""
