"""HTTP APIs, served on the event loop of gRPC."""
