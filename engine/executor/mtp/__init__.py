"""Multi-token prediction: the model's own head drafts one more token, with its own pages."""
