"""The HTTP side of a server: the SMG router as a child that ends with it."""
