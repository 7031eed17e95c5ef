"""How much memory a model, its pages and its workspace take: budget, sizing, planning. No MLX."""
