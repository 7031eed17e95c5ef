"""Survey of the architectures in the installed mlx-lm: a tiny model of each, and how Octavo serves it."""
