"""Low-rank adapters: their files, the adapted layers, and the slots of adapters in use."""

from __future__ import annotations

from .. import mlx_lm_import as mlx_lm_import  # must precede mlx_lm, whose package loads transformers
