"""Guesses at the next tokens of a sequence, checked by the step after: drafters, how much is drafted."""
