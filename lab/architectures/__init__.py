"""Every architecture of the installed mlx-lm, made tiny: which of them are served, and how."""
