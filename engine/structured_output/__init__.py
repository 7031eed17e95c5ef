"""Structured output: which tokens may come next, so that the whole obeys a schema or grammar."""
