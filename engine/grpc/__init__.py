"""gRPC services: octavo.v1, VllmEngine, health and reflection."""
