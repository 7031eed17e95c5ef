"""Verification of backends against a float64 oracle."""
