"""Bugs in the Metal code that writes, copies and decodes pages, as sources would have them."""

from __future__ import annotations

from mutant import Mutant

TG_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

FP4 = (
    Mutant("sign dropped", "format_fp4", " | (word & 0x00080008u) << 12", ""),
    Mutant(
        "nibbles in the wrong order",
        "format_fp4",
        "b = pair(word >> 4), c = pair(word >> 8)",
        "b = pair(word >> 8), c = pair(word >> 4)",
    ),
    Mutant("halves swapped", "format_fp4", "half4(a.x, b.x, c.x, d.x)", "half4(a.y, b.y, c.y, d.y)"),
    Mutant("a tie to the odd code", "format_fp4", "x >= 0.75f * scale", "x > 0.75f * scale"),
    Mutant(
        "errors added in another order",
        "format_fp4",
        "ushort step = 16; step > 0; step /= 2",
        "ushort step = 1; step < 32; step *= 2",
    ),
    Mutant("the last of equal candidates", "format_fp4", "error < best_error", "error <= best_error"),
    Mutant("scales beyond fp16", "format_fp4", ", 65504.0f));", ", 1e9f));"),
    Mutant(
        "each lane its own idea of finite",
        "format_fp4",
        "  finite = simd_all(finite);\n    float top",
        "  float top",
    ),
    Mutant("lanes past the row write", "format_fp4", " && lane * E + w * here < D)", ")"),
    Mutant(
        "a code's sign of negative zero lost",
        "format_fp4",
        "as_type<uint>(x[w * here + i]) >> 31",
        "uint(x[i] < 0.0f)",
    ),
)

WRITE = (
    Mutant("rows past the last are quantized", "quantize", "if (row >= uint(rows_shape[0]))", "if (false)"),
    Mutant("an infinity is stored", "format_half", "(bits[i] & exponent) != exponent", "bits[i] != exponent"),
    Mutant("bf16 truncates", "format_half", "wide + 0x7FFFu + (wide >> 16 & 1u)", "wide"),
    Mutant(
        "halves of a word swapped",
        "format_half",
        "const uint4 even = words << 16, odd = words & 0xFFFF0000u;",
        "const uint4 odd = words << 16, even = words & 0xFFFF0000u;",
    ),
    Mutant(
        "the rotation's high lanes add", "rows", "other - x[i] : x[i] + other", "other + x[i] : x[i] + other"
    ),
)

IN_PLACE = (
    Mutant(
        "flags of other layers are lost", "write", "bool failed = flagged[token];", "bool failed = false;"
    ),
    Mutant("flags of one simdgroup", "write", "i < simdgroups_per_threadgroup; ++i", "i < 1; ++i"),
    Mutant("race: flags before the rows are stored", "write", TG_BARRIER + "  // every row is stored\n", ""),
    Mutant("rows beyond the first round are left out", "write", "i < 2 * heads;", "i < 2 * heads && i < 16;"),
    Mutant(
        "a later row's flag alone",
        "write",
        "v_codes, value_scale_rows) &&\n        finite;",
        "v_codes, value_scale_rows);",
    ),
    Mutant("rows of the first head", "write", "token * heads + i % heads", "token * heads"),
    Mutant("V where K lies", "write", "target, v_codes,", "target + 1, v_codes,"),
)

COPY = (
    Mutant("a page is copied onto itself", "copy", "pairs[2 * pair + 1]", "pairs[2 * pair]"),
    Mutant("the first pair for every pair", "copy", "uint(pairs[2 * pair])", "uint(pairs[0])"),
    Mutant(
        "every KV head copies the first",
        "copy",
        "source = ulong(uint(pairs[2 * pair])) * NUM_KV_HEADS + kv_head",
        "source = ulong(uint(pairs[2 * pair])) * NUM_KV_HEADS",
    ),
    Mutant("a run too long", "copy", "i < words;", "i < words + 1;"),
    Mutant("a run too short", "copy", "i < words;", "i + 1 < words;"),
    Mutant(
        "K's scales stay behind",
        "copy",
        "copy_run(k_scales, (device Keys::Scale*)to_k_scales, KEY_SCALE_WORDS, source, target, first);",
        "",
    ),
    Mutant(
        "every thread copies the whole run",
        "copy",
        "uint i = first; i < words; i += THREADS",
        "uint i = 0; i < words; i += 1",
    ),
    Mutant("a token half written", "copy", "if (first < 8)", "if (first < 4)"),
)

PACKED = (
    Mutant("words of half their codes", "packing", "step < per_word / here", "step < per_word / here / 2"),
    Mutant("each lane its own group", "packing", "step < N / E", "step < 1"),
    Mutant("packed words past the row", "packing", " && lane * E + w * here < D", ""),
    Mutant("the first group's scale", "packing", "lane - octet % OCTETS", "lane - octet"),
    Mutant("an infinity is packed", "packing", "finite = simd_all(finite);", ""),
    Mutant(
        "integer ties away from even", "format_integer", "(odd && size == below)", "(!odd && size == below)"
    ),
    Mutant("integers without a sign", "format_integer", "as_type<int4>(uint4(", "uint4(uint4("),
    Mutant("-128 is stored", "format_integer", "0x3C010204u, 127u", "0x3C010204u, 128u"),
    Mutant("-8 is not stored", "format_integer", "0x3E124925u, 8u", "0x3E124925u, 7u"),
    Mutant("integer scales beyond fp16", "format_integer", ", 65504.0f));", ", 1e9f));"),
    Mutant("E8M0 rounds down", "format_microscaling", "+ 0x3FFFFFu", "+ 0u"),
    Mutant("E8M0 overflows", "format_microscaling", "0, 252)", "0, 254)"),
    Mutant("the least E8M0 scale is zero", "format_microscaling", "code == 0u ? 0x400000u :", "false ? 0u :"),
    Mutant("E4M3 truncates", "format_microscaling", "(bits + 0x7FFFFu + (bits >> 20 & 1u))", "bits"),
    Mutant("E4M3 stores NaN", "format_microscaling", ": normal, 126u)", ": normal, 127u)"),
    Mutant(
        "E4M3 without subnormals",
        "format_microscaling",
        "code < 8u ? float(code) * 0.001953125f :",
        "code == 0u ? 0.0f :",
    ),
    Mutant("the next group's scale", "format_microscaling", "/ N) + octet / (N / 8)]", "/ N) + octet / 4]"),
    Mutant("scales of groups past the row", "format_microscaling", "% N == 0 && lane * E < D", "% N == 0"),
    Mutant("affine from the wrong edge", "format_affine", "fabs(low) > fabs(high)", "fabs(low) < fabs(high)"),
    Mutant("affine zero is not a code", "format_affine", "step = edge / count;", ""),
    Mutant("an affine bias of infinity", "format_affine", "(as_type<ushort>(stored_bias) & 0x7C00)", "0"),
    Mutant("the bias is left out", "format_affine", "low = low * scale + bias;", "low = low * scale;"),
    Mutant("affine codes have signs", "format_affine", ">> 3 * BITS) & mask", ">> 3 * BITS) | ~mask"),
)

FP5 = (
    Mutant("the scale of fp5 is lowest bits", "format_fp5", "octet > 0 ?", "true ?"),
    Mutant("fp5 values are fine from the first", "format_fp5", "lane * E + i < 8 ?", "false ?"),
    Mutant("fp5 ties away from even", "format_fp5", "x >= 0.375f", "x > 0.375f"),
    Mutant("fp5 scales one by one", "format_fp5", "candidate < 4 ? candidate : 6", "candidate"),
    Mutant("fp5 scales beyond the largest", "format_fp5", ", 247u)", ", 249u)"),
    Mutant("fp5 scales of tiny rows are zero", "format_fp5", ">> 7, 1u)", ">> 7, 0u)"),
    Mutant("fp5 rows of zeros have a scale", "format_fp5", "base > half(0.0f) && ", ""),
    Mutant("lowest bits of the next value", "format_fp5", "bits >> 1)", "bits >> 2)"),
)

MUTANTS = FP4 + WRITE + IN_PLACE + COPY + PACKED + FP5
