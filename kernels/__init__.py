"""Page formats, paged attention, recurrent layers and native linear layers."""

from __future__ import annotations

from .formats import FORMAT_NAMES, FORMATS_WITH_KERNELS, PageFormat, page_format

__all__ = ["FORMATS_WITH_KERNELS", "FORMAT_NAMES", "PageFormat", "page_format"]
