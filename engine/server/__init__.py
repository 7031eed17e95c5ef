"""The gRPC face of the engine: octavo.v1.Generation, VllmEngine, health and reflection. No MLX here."""
