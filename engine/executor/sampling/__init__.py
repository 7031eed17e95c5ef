"""From logits to tokens: penalties, truncation, drawing, log probabilities; in NumPy and natively."""
