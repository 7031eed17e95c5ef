"""Page formats, quantize-and-write, paged attention and native linear layers.

Importing this package imports NumPy only; backends import MLX when they are chosen
(``octavo.kernels.backends``).
"""

from __future__ import annotations

from .formats import FORMAT_NAMES, FORMATS_WITH_KERNELS, PageFormat, page_format

__all__ = ["FORMATS_WITH_KERNELS", "FORMAT_NAMES", "PageFormat", "page_format"]
