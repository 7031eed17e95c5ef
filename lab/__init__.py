"""Benchmarks, cache simulations, plots, and a survey of model architectures."""
