"""Verification: a float64 oracle of paged attention, and the self-test of backends against it."""
