"""Timing kernels against the machine's measured roofline."""
