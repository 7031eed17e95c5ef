from __future__ import annotations

from mutant import Mutant

TG_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

FP4 = (
    Mutant("sign dropped", "format_fp4", " | (word & 0x00080008u) << 12", ""),
    Mutant(
        "errors added in another order",
        "format_fp4",
        "ushort step = 16; step > 0; step /= 2",
        "ushort step = 1; step < 32; step *= 2",
    ),
    Mutant("lanes past the row write", "format_fp4", " && lane * E + w * here < D)", ")"),
)

WRITE = (
    Mutant("tokens past the last are stored", "write", "if (token >= uint(keys_shape[0]))", "if (false)"),
    Mutant(
        "the rotation's high lanes add", "rows", "other - x[i] : x[i] + other", "other + x[i] : x[i] + other"
    ),
)

IN_PLACE = (
    Mutant(
        "flags of other layers are lost", "write", "bool failed = flagged[token];", "bool failed = false;"
    ),
    Mutant(
        "a later row's flag alone",
        "write",
        "v_codes, value_scale_rows) &&\n        finite;",
        "v_codes, value_scale_rows);",
    ),
)

COPY = (
    Mutant("a page is copied onto itself", "copy", "pairs[2 * pair + 1]", "pairs[2 * pair]"),
    Mutant("a run too short", "copy", "i < words;", "i + 1 < words;"),
)

PACKED = (
    Mutant("words of half their codes", "packing", "step < per_word / here", "step < per_word / here / 2"),
    Mutant("an infinity is packed", "packing", "finite = simd_all(finite);", ""),
    Mutant("-8 is not stored", "format_integer", "0x3E124925u, 8u", "0x3E124925u, 7u"),
    Mutant("the least E8M0 scale is zero", "format_microscaling", "code == 0u ? 0x400000u :", "false ? 0u :"),
    Mutant("the next group's scale", "format_microscaling", "/ N) + octet / (N / 8)]", "/ N) + octet / 4]"),
    Mutant("an affine bias of infinity", "format_affine", "(as_type<ushort>(stored_bias) & 0x7C00)", "0"),
)

FP5 = (
    Mutant("the scale of fp5 is lowest bits", "format_fp5", "octet > 0 ?", "true ?"),
    Mutant("fp5 scales beyond the largest", "format_fp5", ", 247u)", ", 249u)"),
)

MUTANTS = FP4 + WRITE + IN_PLACE + COPY + PACKED + FP5
