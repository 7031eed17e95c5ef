"""Multi-token prediction: a head in the model's checkpoint drafts one more token, with separate pages."""
