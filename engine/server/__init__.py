"""The gRPC face of the engine: octavo.v1.Generation, health and reflection. No MLX here."""
