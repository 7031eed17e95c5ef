"""The HTTP APIs, served in the same process and event loop as gRPC."""
