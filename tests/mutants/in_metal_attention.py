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
        "no barrier between softmax and values",
        "decode",
        SG_BARRIER + "  // the weights are stored\n",
        "",
    ),
    Mutant("the first pages of the table", "decode", "uint(start) / PAGE_SIZE + lane]", "lane]"),
    Mutant("the next sequence's pages", "decode", "page_table + sequence *", "page_table + (sequence ^ 1) *"),
    Mutant(
        "the wrong KV head of whole pages",
        "decode",
        "tile.first_row = (page * NUM_KV_HEADS + kv_head)",
        "tile.first_row = (page * NUM_KV_HEADS + NUM_KV_HEADS - 1 - kv_head)",
    ),
    Mutant(
        "the page of the tile before",
        "decode",
        "page = page_at(table, span.tile(index + RANGES) * 32",
        "page = page_at(table, span.tile(index) * 32",
    ),
    Mutant("V's scale missing", "decode", "weight * value_scale;", "weight;"),
    Mutant("rows before the window are read", "decode", "sees(key) ? key : uint(first_seen)", "key"),
    Mutant("another row's beginning", "decode", "SINCE(row, position)", "SINCE(item, position)"),
    Mutant("a product sent to itself", "decode", "is_second ? first[g] : second[g];", "second[g];"),
    Mutant(
        "keys in the order of lanes", "decode", "return lane % LANES * ROWS + lane / LANES;", "return lane;"
    ),
    Mutant(
        "queries of lanes beside the row count",
        "decode",
        "query[2 * g] = has_octet ? shared_rows[at] : float4(0.0f);",
        "query[2 * g] = shared_rows[at];",
    ),
    Mutant(
        "race: outputs are read while they are added",
        "decode",
        TG_BARRIER + "  // and so are the sums\n",
        "",
    ),
    Mutant("the lower half's outputs are lost", "decode", "if (!is_upper && lane", "if (false && lane"),
    Mutant("old outputs keep their weight", "decode", "    outs[2 * g] *= factor;\n", ""),
    Mutant("ranges of unequal tops are added", "decode", "  outs[2 * g] *= share;\n", ""),
    Mutant(
        "one tile short", "decode", "for (; index < end_tile; index", "for (; index < end_tile - 1; index"
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
    Mutant(
        "words in the order of lanes", "decode", "RUNS ? at % Lanes::OCTETS", "RUNS ? lane % Lanes::OCTETS"
    ),
)

REDUCE = (
    Mutant("splits of unequal tops are added", "reduce", "part[i] * share", "part[i]"),
    Mutant(
        "the next split's numbers",
        "reduce",
        "const uint at = (first + s) * NUM_HEADS + head;\n  const float top",
        "const uint at = (first + s + 1) * NUM_HEADS + head;\n  const float top",
    ),
    Mutant(
        "race: sums are read before they are stored",
        "reduce",
        TG_BARRIER + "  // every simdgroup's sum is stored\n",
        "",
    ),
)

ATTENTION = (
    Mutant("a key too many", "attention", "return key <= position && (", "return key <= position + 1 && ("),
    Mutant("kept positions are forgotten", "attention", " || key < KEEP)", ")"),
    Mutant("sinks in the wrong base", "attention", "exp2(sink * LOG2_E - joint)", "exp2(sink - joint)"),
    Mutant(
        "the rotation of V stays",
        "attention",
        "  hadamard<VALUE_DIM, VALUE_LANE>(x, lane",
        "  if (false) hadamard<VALUE_DIM, VALUE_LANE>(x, lane",
    ),
)

CHUNK = (
    Mutant("decoded rows stay where they were", "chunk", "out[to * (", "out[from * ("),
    Mutant(
        "stale tile: no barrier at the end",
        "chunk",
        TG_BARRIER + "  // the next K is there, V and products are done with",
        "",
    ),
    Mutant("K before it is there", "chunk", TG_BARRIER + "  // the first K is there", SG_BARRIER),
    Mutant(
        "queries are overwritten before they are loaded",
        "chunk",
        TG_BARRIER + "  // others, or K, overwrite them",
        "",
    ),
    Mutant(
        "outputs are overwritten before they are read",
        "chunk",
        TG_BARRIER + "  // the next turn's overwrite them",
        "",
    ),
    Mutant(
        "the next tile's scales",
        "chunk",
        "key_rows[now + column].key_scale",
        "key_rows[next + column].key_scale",
    ),
    Mutant(
        "causal by the tile's last token",
        "chunk",
        "my_token < tokens ? positions[first_row + my_token]",
        "my_token < tokens ? last_position",
    ),
    Mutant("rows before the window are filled in", "tile", "(key >= since || key < KEEP)", "(key >= 0)"),
    Mutant("keys not transposed", "chunk", "ulong2(0, 0), true)", "ulong2(0, 0), false)"),
    Mutant(
        "octets in the wrong places", "tile", "key * STRIDE + octet * 8", "key * STRIDE + (octet ^ 1) * 8"
    ),
    Mutant(
        "old outputs of a chunk keep their weight", "chunk", "output[n].thread_elements()[1] *= factor;", ""
    ),
    Mutant(
        "rows past the tile's tokens are written",
        "chunk",
        "if (token < tokens) {  // the whole",
        "if (true) {  // the whole",
    ),
    Mutant("K's scales on V", "chunk", "[now + column].value_scale", "[now + column].key_scale"),
    Mutant("tops of half a row", "chunk", "    new_top = max(new_top, simd_shuffle_xor(new_top, 8));\n", ""),
    Mutant("rows in the order of lanes", "tile", "(lane / 4 & 4) + lane / 2 % 4", "lane / 4"),
)

PARTED = (
    Mutant("products over half the width", "chunk", "+ others[i]", ""),
    Mutant("both parts have the first queries", "chunk", "query[k], rows + at * 8", "query[k], rows + k * 8"),
    Mutant("matrices past the row", "chunk", "at < VALUE_MATRICES && c", "c"),
)

MUTANTS = DECODE + RUNS + REDUCE + ATTENTION + CHUNK + PARTED
