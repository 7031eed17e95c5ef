from __future__ import annotations

from mutant import Mutant

TG_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SG_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"

DECODE = (
    Mutant("no barrier after the queries", "decode", TG_BARRIER + "  // the queries are stored\n", ""),
    Mutant("the first pages of the table", "decode", "uint(start) / PAGE_SIZE + lane]", "lane]"),
    Mutant(
        "the wrong KV head of whole pages",
        "decode",
        "tile.first_row = (page * NUM_KV_HEADS + kv_head)",
        "tile.first_row = (page * NUM_KV_HEADS + NUM_KV_HEADS - 1 - kv_head)",
    ),
    Mutant("V's scale missing", "decode", "weight * value_scale;", "weight;"),
    Mutant("another row's beginning", "decode", "SINCE(row, position)", "SINCE(item, position)"),
    Mutant(
        "keys in the order of lanes", "decode", "return lane % LANES * ROWS + lane / LANES;", "return lane;"
    ),
    Mutant(
        "race: outputs are read while they are added", "decode", TG_BARRIER + "  // all sums are stored\n", ""
    ),
    Mutant("old outputs keep their weight", "decode", "    outs[2 * g] *= factor;\n", ""),
    Mutant(
        "one tile short", "decode", "for (; index < end_tile; index", "for (; index < end_tile - 1; index"
    ),
)

RUNS = (Mutant("words of the first run alone", "decode", "== run ? here : there", "== run ? here : here"),)

REDUCE = (
    Mutant("splits of unequal tops are added", "reduce", "part[i] * share", "part[i]"),
    Mutant(
        "race: sums are read before they are stored",
        "reduce",
        TG_BARRIER + "  // the sums of all simdgroups are stored\n",
        "",
    ),
)

ATTENTION = (
    Mutant("a key too many", "attention", "return key <= position && (", "return key <= position + 1 && ("),
    Mutant("sinks in the wrong base", "attention", "exp2(sink * LOG2_E - joint)", "exp2(sink - joint)"),
)

CHUNK = (
    Mutant("decoded rows stay where they were", "chunk", "out[to * (", "out[from * ("),
    Mutant("K before it is there", "chunk", TG_BARRIER + "  // the first tile", SG_BARRIER),
    Mutant(
        "outputs are overwritten before they are read",
        "chunk",
        TG_BARRIER + "  // the next row groups overwrite the staged outputs",
        "",
    ),
    Mutant(
        "causal by the tile's last token",
        "chunk",
        "my_token < tokens ? positions[first_row + my_token]",
        "my_token < tokens ? last_position",
    ),
    Mutant("keys not transposed", "chunk", "ulong2(0, 0), true)", "ulong2(0, 0), false)"),
    Mutant(
        "old outputs of a chunk keep their weight", "chunk", "output[n].thread_elements()[1] *= factor;", ""
    ),
    Mutant("K's scales on V", "chunk", "[now + column].value_scale", "[now + column].key_scale"),
    Mutant("rows in the order of lanes", "tile", "(lane / 4 & 4) + lane / 2 % 4", "lane / 4"),
)

PARTED = (
    Mutant("products over half the width", "chunk", "+ others[i]", ""),
    Mutant("matrices past the row", "chunk", "at < VALUE_MATRICES && c", "c"),
)

MUTANTS = DECODE + RUNS + REDUCE + ATTENTION + CHUNK + PARTED
