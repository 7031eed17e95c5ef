"""Messages and stubs, generated from the .proto files in this folder."""
