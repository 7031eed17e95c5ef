"""Recurrent layers of mlx-lm's models in mixed steps: where their state is kept, and who touches it."""
