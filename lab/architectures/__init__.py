"""Survey of the installed mlx-lm's architectures: tiny models of each, and how they are served."""
