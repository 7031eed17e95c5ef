"""Benchmarks, run by ``octavo bench``."""
