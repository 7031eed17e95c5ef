"""Policies that are measured, documented and not the default."""
