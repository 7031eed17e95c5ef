"""Bugs in the Metal kernels, as sources would have them."""

from __future__ import annotations

from mutant import Mutant

TG_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SG_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"

DECODE = (
    Mutant(
        "no barrier after the queries",
        "decode",
        TG_BARRIER + "  // the queries are stored\n",
        "",
    ),
    Mutant(
        "a barrier that orders no memory",
        "decode",
        TG_BARRIER + "  // the queries are stored\n",
        "threadgroup_barrier(mem_flags::mem_none);\n",
    ),
    Mutant(
        "no barrier between softmax and values",
        "decode",
        SG_BARRIER + "  // the weights are stored\n",
        "",
    ),
    Mutant(
        "stale weights: no barrier before the next tile",
        "decode",
        SG_BARRIER + "  // the next tile's weights overwrite these\n",
        "",
    ),
    Mutant("the first pages of the table", "decode", "uint(start) / PAGE_SIZE + lane]", "lane]"),
    Mutant("a tile's first page for all its keys", "decode", "ushort(lane / PAGE_SIZE)", "ushort(0)"),
    Mutant("the next sequence's pages", "decode", "page_table + sequence *", "page_table + (sequence ^ 1) *"),
    Mutant(
        "the wrong KV head",
        "decode",
        "tile.key_row = (page * NUM_KV_HEADS + kv_head)",
        "tile.key_row = (page * NUM_KV_HEADS + NUM_KV_HEADS - 1 - kv_head)",
    ),
    Mutant(
        "the wrong KV head of whole pages",
        "decode",
        "tile.first_row = (page * NUM_KV_HEADS + kv_head)",
        "tile.first_row = (page * NUM_KV_HEADS + NUM_KV_HEADS - 1 - kv_head)",
    ),
    Mutant(
        "a tile in the middle of a page starts at its front",
        "decode",
        "PAGE_SIZE + uint(start) % PAGE_SIZE",
        "PAGE_SIZE",
    ),
    Mutant(
        "the page of the tile before",
        "decode",
        "page = page_at(table, span.tile(index + RANGES) * 32",
        "page = page_at(table, span.tile(index) * 32",
    ),
    Mutant(
        "the neighbour's scale",
        "decode",
        "Keys::row_scale<HEAD_DIM>(key_scale_rows, scale_row)",
        "Keys::row_scale<HEAD_DIM>(key_scale_rows, scale_row ^ 1)",
    ),
    Mutant("V's scale missing", "decode", "weight * value_scale;", "weight;"),
    Mutant("rows past the last are read", "decode", "min(key, uint(position - start))", "key"),
    Mutant("rows before the window are read", "decode", "sees(key) ? key : uint(first_seen)", "key"),
    Mutant(
        "what is read instead lies before the window",
        "decode",
        "tile.first_seen = position - WINDOW + 1 - start;",
        "tile.first_seen = 0;",
    ),
    Mutant("a product of the other key", "decode", "(is_second ? second[g] : first[g])", "first[g]"),
    Mutant("a product sent to itself", "decode", "is_second ? first[g] : second[g];", "second[g];"),
    Mutant(
        "sums over half the lanes of a row",
        "decode",
        "simd_shuffle_xor(sent, ushort(N / 2))",
        "(N == 2 ? sent : simd_shuffle_xor(sent, ushort(N / 2)))",
    ),
    Mutant(
        "keys in the order of lanes", "decode", "return lane % LANES * ROWS + lane / LANES;", "return lane;"
    ),
    Mutant(
        "weights in the order of keys", "decode", "return key % ROWS * LANES + key / ROWS;", "return key;"
    ),
    Mutant(
        "queries of lanes beside the row count",
        "decode",
        "query[2 * g] = has_octet ? shared_rows[at] : float4(0.0f);",
        "query[2 * g] = shared_rows[at];",
    ),
    Mutant(
        "race: the lower half does not wait for the upper",
        "decode",
        TG_BARRIER + "  // the upper half is stored\n",
        "",
    ),
    Mutant(
        "race: outputs are read while they are added",
        "decode",
        TG_BARRIER + "  // and so are the sums\n",
        "",
    ),
    Mutant(
        "race: queries are overwritten while they are read",
        "decode",
        TG_BARRIER + "  // tops and sums are stored, and the queries done with\n",
        "",
    ),
    Mutant("the lower half's outputs are lost", "decode", "if (!is_upper && lane", "if (false && lane"),
    Mutant(
        "a simdgroup sum in one lane's branch",
        "decode",
        "  const float total = simd_sum(sum[g]);\n  if (lane == 0) {\n",
        "  if (lane == 0) {\n    const float total = simd_sum(sum[g]);\n",
    ),
    Mutant("old outputs keep their weight", "decode", "    outs[2 * g] *= factor;\n", ""),
    Mutant("old sums keep their weight", "decode", "sum[g] * factor + weight", "sum[g] + weight"),
    Mutant("ranges of unequal tops are added", "decode", "  outs[2 * g] *= share;\n", ""),
    Mutant(
        "only the first range's sum",
        "decode",
        "    total += sums[(first + s) * HEADS + g]",
        "    total = sums[(first + s) * HEADS + g]",
    ),
    Mutant(
        "one tile short", "decode", "for (; index < end_tile; index", "for (; index < end_tile - 1; index"
    ),
    Mutant(
        "every slice has the first heads",
        "decode",
        "min(slice * HEADS + g, uint(GROUP) - 1) * QUERY",
        "g * QUERY",
    ),
    Mutant(
        "queries of the first head",
        "decode",
        "first_head + g) * HEAD_DIM, lane",
        "first_head) * HEAD_DIM, lane",
    ),
)

RUNS = (
    Mutant("words of the first run alone", "decode", "== run ? here : there", "== run ? here : here"),
    Mutant("the same run twice", "decode", "min(run + 1, COUNT - 1)", "min(run, COUNT - 1)"),
    Mutant(
        "words in the order of lanes", "decode", "RUNS ? at % Lanes::OCTETS", "RUNS ? lane % Lanes::OCTETS"
    ),
    Mutant(
        "the row of the run's first key",
        "decode",
        "tile.seen(RUNS ? at / Lanes::OCTETS",
        "tile.seen(RUNS ? 32 * i / Lanes::OCTETS",
    ),
)

REDUCE = (
    Mutant("splits of unequal tops are added", "reduce", "part[i] * share", "part[i]"),
    Mutant("sums of unequal tops are added", "reduce", "(stats[4 * at] == joint ? 1.0f", "(true ? 1.0f"),
    Mutant(
        "the next split's numbers",
        "reduce",
        "const uint at = (first + s) * NUM_HEADS + head;\n  const float top",
        "const uint at = (first + s + 1) * NUM_HEADS + head;\n  const float top",
    ),
    Mutant(
        "every head writes the first",
        "reduce",
        "out + (row * NUM_HEADS + head)",
        "out + (row * NUM_HEADS)",
    ),
    Mutant(
        "race: sums are read before they are stored",
        "reduce",
        TG_BARRIER + "  // every simdgroup's sum is stored\n",
        "",
    ),
    Mutant(
        "sums of one simdgroup",
        "reduce",
        "for (uint s = 1; s < NUM_SIMDGROUPS; ++s) {",
        "for (uint s = 1; s < 1; ++s) {",
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
    Mutant("decoded rows stay where they were", "chunk", "out[to * (", "out[from * ("),
    Mutant("a decoded row's first heads", "chunk", "i < GROUP * VALUE_DIM;", "i < VALUE_DIM;"),
    Mutant(
        "stale tile: no barrier at the end",
        "chunk",
        TG_BARRIER + "  // the next K is there, V and products are done with",
        "",
    ),
    Mutant(
        "stale tile: K over K",
        "chunk",
        TG_BARRIER + "  // V and the next rows are there, K is done with",
        SG_BARRIER,
    ),
    Mutant("K before it is there", "chunk", TG_BARRIER + "  // the first K is there", SG_BARRIER),
    Mutant(
        "queries are loaded before they are stored",
        "chunk",
        TG_BARRIER + "  // queries are staged, and the first rows known",
        "",
    ),
    Mutant(
        "queries are overwritten before they are loaded",
        "chunk",
        TG_BARRIER + "  // others, or K, overwrite them",
        "",
    ),
    Mutant("outputs are read before they are stored", "chunk", TG_BARRIER + "  // outputs are staged", ""),
    Mutant(
        "outputs are overwritten before they are read",
        "chunk",
        TG_BARRIER + "  // the next turn's overwrite them",
        "",
    ),
    Mutant("one buffer for two tiles' rows", "chunk", "next = KEYS - now", "next = now"),
    Mutant(
        "the next tile's scales",
        "chunk",
        "key_rows[now + column].key_scale",
        "key_rows[next + column].key_scale",
    ),
    Mutant(
        "the next tile's K is the last one's",
        "chunk",
        "span.tile(index + 1) * KEYS",
        "span.tile(index) * KEYS",
    ),
    Mutant(
        "causal by the tile's last token",
        "chunk",
        "if (is_visible(key, my_position))",
        "if (is_visible(key, last_position))",
    ),
    Mutant("rows outside are read", "tile", "if (row != UNUSED)", "if (true)"),
    Mutant("keys not transposed", "chunk", "ulong2(0, 0), true)", "ulong2(0, 0), false)"),
    Mutant("tiles too close together", "tile", "tile + key * STRIDE", "tile + key * D"),
    Mutant(
        "octets in the wrong places", "tile", "key * STRIDE + octet * 8", "key * STRIDE + (octet ^ 1) * 8"
    ),
    Mutant(
        "halves of an octet swapped",
        "tile",
        "((threadgroup half4*)to)[0] = half4(low)",
        "((threadgroup half4*)to)[0] = half4(high)",
    ),
    Mutant(
        "old outputs of a chunk keep their weight", "chunk", "output[n].thread_elements()[1] *= factor;", ""
    ),
    Mutant("old sums of a chunk keep their weight", "chunk", "    sum *= factor;\n", ""),
    Mutant(
        "rows past the tile's tokens are written",
        "chunk",
        "if (token < tokens) {  // the whole",
        "if (true) {  // the whole",
    ),
    Mutant(
        "half a tile is loaded",
        "tile",
        "      if (has_unit(i, thread_index)) {\n        put",
        "      if (i < TURNS / 2) {\n        put",
    ),
    Mutant("K's scales on V", "chunk", "[now + column].value_scale", "[now + column].key_scale"),
    Mutant("a row's sum over half its lanes", "chunk", "sum += simd_shuffle_xor(sum, 8);\n", ""),
    Mutant("tops of half a row", "chunk", "    new_top = max(new_top, simd_shuffle_xor(new_top, 8));\n", ""),
    Mutant("columns in the order of lanes", "tile", "(lane / 4 & 2) * 2 + lane % 2 * 2", "lane % 4 * 2"),
    Mutant("rows in the order of lanes", "tile", "(lane / 4 & 4) + lane / 2 % 4", "lane / 4"),
    Mutant("another row's sum", "tile", "(row & 4) * 4 + row % 4 * 2", "row * 4"),
)

PARTED = (
    Mutant("products over half the width", "chunk", "+ others[i]", ""),
    Mutant("its own half twice", "chunk", "(simd_index ^ 1u)", "simd_index"),
    Mutant("both parts have the first queries", "chunk", "query[k], rows + at * 8", "query[k], rows + k * 8"),
    Mutant(
        "both parts have the first values",
        "chunk",
        "ValueFilling::STRIDE + at * 8",
        "ValueFilling::STRIDE + n * 8",
    ),
    Mutant("matrices past the row", "chunk", "at < VALUE_MATRICES && c", "c"),
)

LATENT = (
    Mutant("latents over latents", "latent", TG_BARRIER + "  // latents and products are done with", ""),
    Mutant(
        "latents before they are there", "latent", TG_BARRIER + "  // the next keys are there", SG_BARRIER
    ),
    Mutant(
        "products of parts that are not there",
        "latent",
        TG_BARRIER + "  // products of all parts and the next rows are there",
        SG_BARRIER,
    ),
    Mutant("a part's products left out", "latent", "p = 0; p < PARTS; ++p", "p = 0; p < PARTS - 1; ++p"),
    Mutant("products of another row group", "latent", "row_group * (PARTS * KEYS / 8 * 32)", "0"),
    Mutant(
        "latents' scale on rotary keys",
        "latent",
        "turned.thread_elements()[i] * key_rows[column].value_scale",
        "turned.thread_elements()[i] * key_rows[column].key_scale",
    ),
    Mutant(
        "rotary keys' scale on values",
        "latent",
        "weight * key_rows[now + column].key_scale",
        "weight * key_rows[now + column].value_scale",
    ),
    Mutant("rotary queries scaled twice", "latent", "y[j] * LOG2_E", "y[j] * params[0]"),
    Mutant("rotary queries not in log2", "latent", "y[j] * LOG2_E", "y[j]"),
    Mutant(
        "rotary keys left out", "latent", "+\n                  turned", "+\n                  0.0f * turned"
    ),
    Mutant(
        "all parts have the first rotary keys",
        "latent",
        "staged + HEAD_DIM + at * 8",
        "staged + HEAD_DIM + k * 8",
    ),
    Mutant(
        "all parts have the first latents",
        "latent",
        "LatentFilling::STRIDE + at * 8, LatentFilling::STRIDE);",
        "LatentFilling::STRIDE + n * 8, LatentFilling::STRIDE);",
    ),
    Mutant(
        "a tile begins with its token",
        "latent",
        "ulong(first_row) * NUM_HEADS + skipped + r",
        "ulong(first_row) * NUM_HEADS + r",
    ),
    Mutant(
        "outputs begin with their token",
        "latent",
        "out_row * NUM_HEADS + skipped + r",
        "out_row * NUM_HEADS + r",
    ),
    Mutant(
        "causal by the tile's first token",
        "latent",
        "positions[first_row + (skipped + my_row) / NUM_HEADS]",
        "positions[first_row]",
    ),
    Mutant(
        "keys of the tile's first token",
        "latent",
        "positions[first_row + (skipped + count - 1) / NUM_HEADS]",
        "positions[first_row]",
    ),
    Mutant("a split reads to the end", "latent", "min(item[6], ", "max(item[6], "),
    Mutant(
        "a split begins at the start",
        "latent",
        "int index = item[5] * STEPS, start = span.tile(item[5]) * 32",
        "int index = 0, start = span.tile(0) * 32",
    ),
    Mutant("half of 32 keys", "latent", "(index + 1) % STEPS * KEYS", "0"),
    Mutant("old latents keep their weight", "latent", "output[n].thread_elements()[1] *= factor;", ""),
    Mutant(
        "rows past the tile's are written",
        "latent",
        "if (r < count) {  // the whole simdgroup",
        "if (true) {",
    ),
    Mutant(
        "latents stay rotated",
        "latent",
        "hadamard<HEAD_DIM, KEY_LANE>(x",
        "if (false) hadamard<HEAD_DIM, KEY_LANE>(x",
    ),
    Mutant(
        "rotary queries not rotated",
        "latent",
        "hadamard<ROTARY_DIM, ROTARY_LANE>(y",
        "if (false) hadamard<ROTARY_DIM, ROTARY_LANE>(y",
    ),
    Mutant(
        "the second word of 16 codes",
        "format_fp4",
        "codes[row * (D / 8) + lane * E / 8 + w]",
        "codes[row * (D / 8) + lane * E / 8]",
    ),
    Mutant(
        "the second octet's bits",
        "format_fp5",
        "planes[row * (D / 8) + lane * E / 8 + w]",
        "planes[row * (D / 8) + lane * E / 8]",
    ),
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

DENSE = (
    Mutant("dense keys of the first positions", "dense", "uint(run[3]) + key", "key"),
    Mutant(
        "dense rows of the next sequence",
        "dense",
        "page_table + uint(run[2])",
        "page_table + uint(run[2] ^ 1)",
    ),
    Mutant(
        "dense rows of the first KV head", "dense", "NUM_KV_HEADS + kv_head) * PAGE", "NUM_KV_HEADS) * PAGE"
    ),
    Mutant("dense rows stay rotated", "dense", "if (ROTATES) {", "if (false) {"),
    Mutant("dense rows without their scale", "dense", "= high[i] * scale;", "= high[i];"),
    Mutant("dense rows past the run", "dense", " && first + lane / LANES < count", ""),
    Mutant("dense codes past the row", "dense", "reads ? octet : 0u), low", "octet), low"),
)

MUTANTS = (
    DECODE
    + DENSE
    + RUNS
    + REDUCE
    + ATTENTION
    + CHUNK
    + PARTED
    + LATENT
    + FP4
    + WRITE
    + IN_PLACE
    + COPY
    + PACKED
    + FP5
)
