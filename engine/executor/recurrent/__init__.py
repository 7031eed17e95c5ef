"""Recurrent layers of mlx-lm's models in mixed steps: state slots and kernels."""
