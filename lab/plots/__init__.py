"""Figures of benchmarks and cache simulations (matplotlib, optional)."""
