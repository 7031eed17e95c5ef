"""Low-rank adapters: their files, the layers that they change, and slots in which several serve."""

from __future__ import annotations

from .. import mlx_lm_import as mlx_lm_import  # before mlx_lm itself, whose package loads transformers
