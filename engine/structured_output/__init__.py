"""Structured output: masks of the tokens that a schema or grammar allows."""
