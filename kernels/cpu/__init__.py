"""Native CPU kernels. Importing a submodule raises ImportError if the extension was not built."""
