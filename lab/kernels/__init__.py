"""Kernel timings against the machine's measured roofline."""
