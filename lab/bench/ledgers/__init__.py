"""Synthetic ledgers with questions about them; a seed always gives the same document."""
