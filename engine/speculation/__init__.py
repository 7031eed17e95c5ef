"""Speculative decoding: sources of draft tokens, and how many drafts a step verifies."""
