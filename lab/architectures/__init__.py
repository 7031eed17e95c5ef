"""Survey of the architectures in the installed mlx-lm."""
