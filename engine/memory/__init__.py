"""Memory of a model, its pages and its workspace: budget, sizing, planning. No MLX."""
