"""Speculative decoding: sources of draft tokens, and the number of drafts that a step verifies."""
