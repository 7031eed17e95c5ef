from __future__ import annotations

from mutant import Mutant

TG_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SG_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"

LATENT = (
    Mutant("latents over latents", "latent", TG_BARRIER + "  // latents and part_products may", ""),
    Mutant("products of another row group", "latent", "row_group * (PARTS * KEYS / 8 * 32)", "0"),
    Mutant("rotary queries not in log2", "latent", "y[j] * LOG2_E", "y[j]"),
    Mutant(
        "a tile begins with its token",
        "latent",
        "ulong(first_row) * NUM_HEADS + skipped + r",
        "ulong(first_row) * NUM_HEADS + r",
    ),
    Mutant(
        "all rows over latents begin where the tile does",
        "latent",
        "SINCE(first_row + (skipped + min(my_row, count - 1)) / NUM_HEADS, my",
        "SINCE(first_row, my",
    ),
    Mutant("old latents keep their weight", "latent", "output[n].thread_elements()[1] *= factor;", ""),
    Mutant(
        "the second word of 16 codes",
        "format_fp4",
        "codes[row * (D / 8) + lane * E / 8 + w]",
        "codes[row * (D / 8) + lane * E / 8]",
    ),
)

MUTANTS = LATENT
