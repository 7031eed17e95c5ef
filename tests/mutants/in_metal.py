"""Bugs in the Metal kernels, as sources would have them."""

from __future__ import annotations

from mutant import Mutant

TG_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SG_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"

DECODE = (
    Mutant(
        "no barrier after the queries",
        "decode",
        TG_BARRIER + "\n\nconst uint key_octet",
        "\nconst uint key_octet",
    ),
    Mutant(
        "a barrier that orders no memory",
        "decode",
        TG_BARRIER + "\n\nconst uint key_octet",
        "threadgroup_barrier(mem_flags::mem_none);\n\nconst uint key_octet",
    ),
    Mutant(
        "no barrier between products and softmax",
        "decode",
        SG_BARRIER + "\n\n  for (uint g = 0; g < GROUP; ++g) {\n    const float x",
        "\n  for (uint g = 0; g < GROUP; ++g) {\n    const float x",
    ),
    Mutant(
        "no barrier between softmax and values",
        "decode",
        "    high_out[g] *= factor[g];\n  }\n  " + SG_BARRIER,
        "    high_out[g] *= factor[g];\n  }\n",
    ),
    Mutant(
        "stale weights: no barrier before the next tile",
        "decode",
        SG_BARRIER + "  // the next tile's products overwrite the weights",
        "",
    ),
    Mutant("the first pages of the table", "decode", "uint(start) / PAGE_SIZE + lane", "lane"),
    Mutant("a tile's first page for all its keys", "decode", "ushort(lane / PAGE_SIZE)", "ushort(0)"),
    Mutant("the next sequence's pages", "decode", "page_table[sequence *", "page_table[(sequence ^ 1) *"),
    Mutant(
        "the wrong KV head",
        "decode",
        "(page * NUM_KV_HEADS + kv_head)",
        "(page * NUM_KV_HEADS + NUM_KV_HEADS - 1 - kv_head)",
    ),
    Mutant(
        "the neighbour's scale",
        "decode",
        "Keys::row_scale<HEAD_DIM>(KEY_SCALES, key_row)",
        "Keys::row_scale<HEAD_DIM>(KEY_SCALES, key_row ^ 1)",
    ),
    Mutant("V's scale missing", "decode", "weight * value_scale;", "weight;"),
    Mutant(
        "all rows of a tile are read",
        "decode",
        "if (reads && is_visible(start + int(r), position)) {\n      Keys",
        "if (reads) {\n      Keys",
    ),
    Mutant(
        "race: simdgroups add their outputs at once",
        "decode",
        "if (simd_index == turn && lane",
        "if (lane",
    ),
    Mutant(
        "race: no barrier between the turns",
        "decode",
        "    }\n  }\n  " + TG_BARRIER + "\n}\nfor (uint g = simd_index",
        "    }\n  }\n}\nfor (uint g = simd_index",
    ),
    Mutant(
        "a simdgroup sum in one lane's branch",
        "decode",
        "  const float total = simd_sum(sum[g]);\n  if (lane == 0) {\n",
        "  if (lane == 0) {\n    const float total = simd_sum(sum[g]);\n",
    ),
    Mutant(
        "a barrier in a divergent branch",
        "decode",
        "  }\n  " + TG_BARRIER + "\n}\nfor (uint g = simd_index",
        "    " + TG_BARRIER + "\n  }\n}\nfor (uint g = simd_index",
    ),
    Mutant("old outputs keep their weight", "decode", "    low_out[g] *= factor[g];\n", ""),
    Mutant("old sums keep their weight", "decode", "sum[g] * factor[g] + weight", "sum[g] + weight"),
    Mutant(
        "only the first simdgroup's sum",
        "decode",
        "    total += sums[s * GROUP + g]",
        "    total = sums[s * GROUP + g]",
    ),
    Mutant("one tile short", "decode", "index < end_tile;", "index < end_tile - 1;"),
    Mutant(
        "queries of the first head",
        "decode",
        "first_head + g) * HEAD_DIM, lane",
        "first_head) * HEAD_DIM, lane",
    ),
    Mutant(
        "a lane past the row adds its neighbour's", "decode", "index + first < COUNT ? other : 0.0f", "other"
    ),
)

RUNS = (
    Mutant("words of the current run alone", "decode", "index ? here : there", "index ? here : here"),
    Mutant("the first run for ever", "decode", "      ++index;\n      current = next;\n", "      ++index;\n"),
    Mutant("one run too few", "decode", "index + 1 < COUNT ?", "index + 2 < COUNT ?"),
    Mutant(
        "a run of unseen rows is read",
        "decode",
        "return is_visible(start + int(at / COUNT), position)",
        "return true",
    ),
    Mutant("words in the order of lanes", "decode", "* COUNT + at % COUNT", "* COUNT + lane % COUNT"),
    Mutant("the row of the run's first key", "decode", "ushort(at / COUNT)", "ushort(32 * run / COUNT)"),
)

REDUCE = (
    Mutant("splits of unequal tops are added", "reduce", "part[i] * share", "part[i]"),
    Mutant("sums of unequal tops are added", "reduce", "stats[4 * at + 1] * share", "stats[4 * at + 1]"),
    Mutant(
        "the next split's numbers",
        "reduce",
        "const ulong at = ulong(first + s)",
        "const ulong at = ulong(first + s + 1)",
    ),
    Mutant(
        "every head writes the first",
        "reduce",
        "out + (ulong(row) * NUM_HEADS + head)",
        "out + (ulong(row) * NUM_HEADS)",
    ),
)

ATTENTION = (
    Mutant("a key too many", "attention", "return key <= position && (", "return key <= position + 1 && ("),
    Mutant("window off by one", "attention", "key > position - WINDOW", "key >= position - WINDOW"),
    Mutant("kept positions are forgotten", "attention", " || key < KEEP)", ")"),
    Mutant(
        "the window starts a tile late", "attention", "span.window = low / N;", "span.window = low / N + 1;"
    ),
    Mutant("sinks in the wrong base", "attention", "exp2(sink * LOG2_E - joint)", "exp2(sink - joint)"),
    Mutant(
        "softcap forgotten",
        "attention",
        "params[2] * tanh(product * params[1])",
        "params[2] * product * params[1]",
    ),
    Mutant(
        "the rotation of V stays",
        "attention",
        "  hadamard<VALUE_DIM, VALUE_LANE>(x, lane",
        "  if (false) hadamard<VALUE_DIM, VALUE_LANE>(x, lane",
    ),
)

CHUNK = (
    Mutant(
        "stale tile: no barrier at the end",
        "chunk",
        TG_BARRIER + "  // the next tile overwrites rows, scales and V",
        "",
    ),
    Mutant(
        "stale tile: V over K",
        "chunk",
        TG_BARRIER + "  // products are stored, and the K tile is done with",
        SG_BARRIER,
    ),
    Mutant(
        "a simdgroup waits only for itself",
        "chunk",
        TG_BARRIER + "  // the V tile is loaded, the weights are stored",
        SG_BARRIER,
    ),
    Mutant(
        "rows are used before they are known",
        "chunk",
        TG_BARRIER + "  // also: the queries or the last V tile are done with",
        "",
    ),
    Mutant(
        "queries are loaded before they are stored",
        "chunk",
        SG_BARRIER + "\nfor (uint k = 0;",
        "for (uint k = 0;",
    ),
    Mutant(
        "causal by the tile's last token",
        "chunk",
        "if (is_visible(key, my_position))",
        "if (is_visible(key, last_position))",
    ),
    Mutant("rows outside are read", "chunk", "if (key_rows[key] != UNUSED)", "if (true)"),
    Mutant("keys not transposed", "chunk", "ulong2(0, 0), true)", "ulong2(0, 0), false)"),
    Mutant("tiles too close together", "chunk", "tile + key * (D + 8)", "tile + key * D"),
    Mutant("rescaled only if every row must be", "chunk", "simd_any(factor", "simd_all(factor"),
    Mutant(
        "rows past the tile's tokens are written",
        "chunk",
        "if (token < tokens) {  // the whole",
        "if (true) {  // the whole",
    ),
    Mutant("K's scales on V", "chunk", "weight * value_scales[c]", "weight * key_scales[c]"),
    Mutant("a row's sum over half its lanes", "chunk", "sum += simd_shuffle_xor(sum, 2);\n", ""),
    Mutant("tops of half a row", "chunk", "  new_top = max(new_top, simd_shuffle_xor(new_top, 2));\n", ""),
)

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
    Mutant("lanes past the row write", "format_fp4", " && lane * E < D) {\n      codes", ") {\n      codes"),
    Mutant(
        "a code's sign of negative zero lost", "format_fp4", "as_type<uint>(x[i]) >> 31", "uint(x[i] < 0.0f)"
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

MUTANTS = DECODE + RUNS + REDUCE + ATTENTION + CHUNK + FP4 + WRITE + COPY + PACKED + FP5
