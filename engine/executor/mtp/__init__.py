"""Multi-token prediction: the model's own head that guesses one token further, on pages of its own."""
