"""mlx-lm's modules on native CPU kernels: linear layers, norms, rotary embeddings, activations."""
