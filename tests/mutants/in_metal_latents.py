"""Bugs in the Metal kernel of attention over latents, as its source would have them."""

from __future__ import annotations

from mutant import Mutant

TG_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SG_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"

LATENT = (
    Mutant("latents over latents", "latent", TG_BARRIER + "  // latents and products are done with", ""),
    Mutant(
        "products of parts that are not there",
        "latent",
        TG_BARRIER + "  // products of all parts and the next rows are there",
        SG_BARRIER,
    ),
    Mutant("products of another row group", "latent", "row_group * (PARTS * KEYS / 8 * 32)", "0"),
    Mutant(
        "rotary keys' scale on values",
        "latent",
        "weight * key_rows[now + column].key_scale",
        "weight * key_rows[now + column].value_scale",
    ),
    Mutant("rotary queries not in log2", "latent", "y[j] * LOG2_E", "y[j]"),
    Mutant(
        "all parts have the first rotary keys",
        "latent",
        "staged + HEAD_DIM + at * 8",
        "staged + HEAD_DIM + k * 8",
    ),
    Mutant(
        "a tile begins with its token",
        "latent",
        "ulong(first_row) * NUM_HEADS + skipped + r",
        "ulong(first_row) * NUM_HEADS + r",
    ),
    Mutant(
        "causal by the tile's first token",
        "latent",
        "positions[first_row + (skipped + my_row) / NUM_HEADS]",
        "positions[first_row]",
    ),
    Mutant(
        "all rows over latents begin where the tile does",
        "latent",
        "SINCE(first_row + (skipped + min(my_row, count - 1)) / NUM_HEADS, my",
        "SINCE(first_row, my",
    ),
    Mutant(
        "a split begins at the start",
        "latent",
        "int index = item[5] * STEPS, start = span.tile(item[5]) * 32",
        "int index = 0, start = span.tile(0) * 32",
    ),
    Mutant("old latents keep their weight", "latent", "output[n].thread_elements()[1] *= factor;", ""),
    Mutant(
        "latents stay rotated",
        "latent",
        "hadamard<HEAD_DIM, KEY_LANE>(x",
        "if (false) hadamard<HEAD_DIM, KEY_LANE>(x",
    ),
    Mutant(
        "the second word of 16 codes",
        "format_fp4",
        "codes[row * (D / 8) + lane * E / 8 + w]",
        "codes[row * (D / 8) + lane * E / 8]",
    ),
)

MUTANTS = LATENT
