"""Benchmarks: programs with a contract, run by ``octavo bench``."""
