"""Bugs in the Metal code that writes, copies and decodes pages, as sources would have them."""

from __future__ import annotations

from mutant import Mutant

TG_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

FP4 = (
    Mutant("sign dropped", "format_fp4", " | (word & 0x00080008u) << 12", ""),
    Mutant("halves swapped", "format_fp4", "half4(a.x, b.x, c.x, d.x)", "half4(a.y, b.y, c.y, d.y)"),
    Mutant(
        "errors added in another order",
        "format_fp4",
        "ushort step = 16; step > 0; step /= 2",
        "ushort step = 1; step < 32; step *= 2",
    ),
    Mutant("scales beyond fp16", "format_fp4", ", 65504.0f));", ", 1e9f));"),
    Mutant("lanes past the row write", "format_fp4", " && lane * E + w * here < D)", ")"),
)

WRITE = (
    Mutant("rows past the last are quantized", "quantize", "if (row >= uint(rows_shape[0]))", "if (false)"),
    Mutant("bf16 truncates", "format_half", "wide + 0x7FFFu + (wide >> 16 & 1u)", "wide"),
    Mutant(
        "the rotation's high lanes add", "rows", "other - x[i] : x[i] + other", "other + x[i] : x[i] + other"
    ),
)

IN_PLACE = (
    Mutant(
        "flags of other layers are lost", "write", "bool failed = flagged[token];", "bool failed = false;"
    ),
    Mutant("race: flags before the rows are stored", "write", TG_BARRIER + "  // every row is stored\n", ""),
    Mutant(
        "a later row's flag alone",
        "write",
        "v_codes, value_scale_rows) &&\n        finite;",
        "v_codes, value_scale_rows);",
    ),
    Mutant("V where K lies", "write", "target, v_codes,", "target + 1, v_codes,"),
)

COPY = (
    Mutant("a page is copied onto itself", "copy", "pairs[2 * pair + 1]", "pairs[2 * pair]"),
    Mutant(
        "every KV head copies the first",
        "copy",
        "source = ulong(uint(pairs[2 * pair])) * NUM_KV_HEADS + kv_head",
        "source = ulong(uint(pairs[2 * pair])) * NUM_KV_HEADS",
    ),
    Mutant("a run too short", "copy", "i < words;", "i + 1 < words;"),
    Mutant(
        "every thread copies the whole run",
        "copy",
        "uint i = first; i < words; i += THREADS",
        "uint i = 0; i < words; i += 1",
    ),
)

PACKED = (
    Mutant("words of half their codes", "packing", "step < per_word / here", "step < per_word / here / 2"),
    Mutant("packed words past the row", "packing", " && lane * E + w * here < D", ""),
    Mutant("an infinity is packed", "packing", "finite = simd_all(finite);", ""),
    Mutant("integers without a sign", "format_integer", "as_type<int4>(uint4(", "uint4(uint4("),
    Mutant("-8 is not stored", "format_integer", "0x3E124925u, 8u", "0x3E124925u, 7u"),
    Mutant("E8M0 rounds down", "format_microscaling", "+ 0x3FFFFFu", "+ 0u"),
    Mutant("the least E8M0 scale is zero", "format_microscaling", "code == 0u ? 0x400000u :", "false ? 0u :"),
    Mutant("E4M3 stores NaN", "format_microscaling", ": normal, 126u)", ": normal, 127u)"),
    Mutant("the next group's scale", "format_microscaling", "/ N) + octet / (N / 8)]", "/ N) + octet / 4]"),
    Mutant("affine from the wrong edge", "format_affine", "fabs(low) > fabs(high)", "fabs(low) < fabs(high)"),
    Mutant("an affine bias of infinity", "format_affine", "(as_type<ushort>(stored_bias) & 0x7C00)", "0"),
    Mutant("affine codes have signs", "format_affine", ">> 3 * BITS) & mask", ">> 3 * BITS) | ~mask"),
)

FP5 = (
    Mutant("the scale of fp5 is lowest bits", "format_fp5", "octet > 0 ?", "true ?"),
    Mutant("fp5 ties away from even", "format_fp5", "x >= 0.375f", "x > 0.375f"),
    Mutant("fp5 scales beyond the largest", "format_fp5", ", 247u)", ", 249u)"),
    Mutant("fp5 rows of zeros have a scale", "format_fp5", "base > half(0.0f) && ", ""),
)

MUTANTS = FP4 + WRITE + IN_PLACE + COPY + PACKED + FP5
