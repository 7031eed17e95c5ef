"""Messages and stubs, generated from the .proto files beside them."""
