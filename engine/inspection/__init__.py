"""Inspection of the prefix cache for operators: statistics, explanations of misses, reuse."""
