from __future__ import annotations

import in_metal_attention
import in_metal_latents
import in_metal_pages
import in_metal_recurrent

MUTANTS = (
    *in_metal_attention.MUTANTS,
    *in_metal_latents.MUTANTS,
    *in_metal_pages.MUTANTS,
    *in_metal_recurrent.MUTANTS,
)
