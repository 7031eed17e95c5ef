"""Bugs in the Metal kernels of attention over K and V, as sources would have them."""

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
        "tile.first_seen = since - start;",
        "tile.first_seen = 0;",
    ),
    Mutant("another row's beginning", "decode", "SINCE(row, position)", "SINCE(item, position)"),
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
    Mutant("window off by one", "attention", "key >= since", "key >= since - 1"),
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
        "my_token < tokens ? positions[first_row + my_token]",
        "my_token < tokens ? last_position",
    ),
    Mutant(
        "all rows begin where the tile does",
        "chunk",
        "SINCE(first_row + min(my_token, tokens - 1), my",
        "SINCE(first_row, my",
    ),
    Mutant("rows before the window are filled in", "tile", "(key >= since || key < KEEP)", "(key >= 0)"),
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

MUTANTS = DECODE + RUNS + REDUCE + ATTENTION + CHUNK + PARTED + DENSE
