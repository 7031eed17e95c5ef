"""From a folder to a model ready to serve: finding layers, loading weights, probing parity."""
