"""The HTTP APIs, in the server's process and event loop."""
