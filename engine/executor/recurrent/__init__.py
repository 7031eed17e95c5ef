"""Recurrent layers of mlx-lm's models in mixed steps: their state slots and the code that updates them."""
