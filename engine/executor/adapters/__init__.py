"""Low-rank adapters: files, adapted layers, and slots of adapters in use."""

from __future__ import annotations

from .. import mlx_lm_import as mlx_lm_import  # must precede mlx_lm, whose package loads transformers
