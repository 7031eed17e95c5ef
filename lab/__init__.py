"""Octavo's laboratory: benchmarks, cache simulations, plots, and a survey of model architectures."""
