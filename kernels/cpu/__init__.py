"""Native CPU kernels: paged attention (``backend``) and linear layers (``linear``, ``modules``).

Importing one of these modules raises ImportError if the extension was not built, or was built for another
version of MLX. The engine then uses the reference kernels.
"""
