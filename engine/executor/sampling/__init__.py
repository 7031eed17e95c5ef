"""From logits to tokens: penalties, truncation, sampling and log-probabilities."""
