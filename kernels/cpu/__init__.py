"""Native CPU kernels: paged attention (``backend``) and linear layers (``linear``, ``modules``).

Importing any of them raises ImportError if the extension was not built or does not fit the installed MLX; the
reference kernels are used then.
"""
