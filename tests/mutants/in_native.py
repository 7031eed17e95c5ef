"""Bugs in the native kernels: recorded steps, checks of indices, mapped weights, products of bytes."""

from __future__ import annotations

from mutant import Mutant

PROGRAM = "program/program.cpp"
RUN = "program/bindings.cpp"
OPS = "program/recorded_ops.cpp"
ARENA = "program/encoder.cpp"
INDICES = "pages/indices.cpp"
MAPPED = "linear/mapped_file.cpp"
QUERIES = "attention/byte_queries_avx2.h"
KEYS = "attention/byte_keys_avx2.cpp"
VALUES = "attention/byte_values_avx2.cpp"
WEIGHTS = "attention/byte_weights_avx2.h"
CODES = "attention/codes_avx2.h"
GROUP_KEYS = "attention/group_keys_avx2.cpp"
GROUP_VALUES = "attention/group_values_avx2.cpp"
GROUP_CODES = "attention/group_codes_avx2.h"
STORES = "pages/quantize_avx2.h"
ROWS = "linear/integer_rows_avx2.h"
LINEAR = "linear/quantized_avx2.cpp"

MUTANTS = (
    # steps as programs
    Mutant(
        "a program computes with its first values",
        RUN,
        "std::memcpy(mx::array(filled[i]).data<int32_t>(), values[i].data(), 4 * values[i].size());",
        'if (values[i].size() == 0) throw std::invalid_argument("no values");',
    ),
    Mutant(
        "a program takes values of any number",
        RUN,
        "require(values[i].size() == filled[i].size(),",
        "require(values[i].size() >= 0,",
    ),
    Mutant(
        "a program runs its work once only",
        PROGRAM,
        "for (const auto& task : tasks_) task();",
        "for (const auto& task : tasks_) task();\n  tasks_.clear();",
    ),
    Mutant(
        "results are overwritten before they are read", ARENA, "range->begin = taken.end;", "(void)taken.end;"
    ),
    Mutant(
        "a range is too small for its array",
        ARENA,
        "take(kLine + (bytes + kLine - 1) / kLine * kLine)",
        "take(kLine + bytes / 2 / kLine * kLine)",
    ),
    Mutant(
        "ranges that were read are not used again",
        ARENA,
        "if (recording != recording_) return;",
        "if (recording >= 0) return;",
    ),
    Mutant(
        "memory grows with every recording",
        ARENA,
        "for (Segment& segment : segments_) segment.free = {{0, segment.size}};",
        "",
    ),
    Mutant("arrays live as long as their recording", PROGRAM, "std::exchange(order[i], nothing)", "order[i]"),
    Mutant(
        "weights a program reads are not held",
        PROGRAM,
        "if (results.count(input.id()) == 0) read_.push_back(input);",
        "",
    ),
    Mutant(
        "siblings are recorded twice",
        PROGRAM,
        "for (const mx::array& sibling : x.siblings()) seen.insert(sibling.id());",
        "",
    ),
    Mutant(
        "only first outputs depend on inputs",
        PROGRAM,
        "for (const mx::array& output : x.outputs()) inputs.insert(output.id());\n    depends",
        "inputs.insert(x.id());\n    depends",
    ),
    Mutant(
        "constants are not computed",
        PROGRAM,
        "if (!constants.empty()) evaluate(",
        "if (constants.size() > 1000) evaluate(",
    ),
    Mutant(
        "sums and products are taken for each other",
        OPS,
        '"Multiply") == 0, encoder',
        '"Multiply") != 0, encoder',
    ),
    Mutant(
        "arrays with gaps are reshaped as they lie",
        OPS,
        "const mx::array plain = row_contiguous(input, encoder);\n  mx::Strides",
        "const mx::array& plain = input;\n  mx::Strides",
    ),
    Mutant("sums take arrays with gaps as they lie", OPS, "right = row_contiguous(b, encoder)", "right = b"),
    Mutant(
        "results of MLX's are copied as they lie",
        "program/mlx_tasks.cpp",
        "if (from.flags().row_contiguous) {",
        "if (from.flags().contiguous) {",
    ),
    Mutant(
        "memory that MLX reads begins at its buffer",
        "program/mlx_tasks.cpp",
        "from.flags(), from.offset());",
        "from.flags(), 0);",
    ),
    # indices
    Mutant(
        "a slot behind the last page passes", INDICES, "num_pages * page_size)", "num_pages * page_size + 1)"
    ),
    Mutant(
        "a page behind the last passes",
        INDICES,
        "all_below(step.page_table, num_pages)",
        "all_below(step.page_table, num_pages + 1)",
    ),
    Mutant(
        "lengths beyond the page table pass",
        INDICES,
        "step.table_width * page_size + 1)",
        "step.table_width * page_size + 2)",
    ),
    Mutant("negative indices pass", INDICES, "if (value < 0 || value >= limit)", "if (value >= limit)"),
    Mutant(
        "a sequence without rows passes",
        INDICES,
        "step.q_start[b + 1] <= step.q_start[b]",
        "step.q_start[b + 1] < step.q_start[b]",
    ),
    Mutant("rows may begin anywhere", INDICES, "step.q_start[0] != 0 || ", ""),
    Mutant(
        "rows may end anywhere", INDICES, " || step.q_start[sequences] != static_cast<int64_t>(tokens)", ""
    ),
    Mutant(
        "a position behind its context passes",
        INDICES,
        "step.positions[row] >= step.kv_len[b]",
        "step.positions[row] > step.kv_len[b]",
    ),
    Mutant("slots may be fewer than rows", INDICES, "step.slots.size() != tokens ||", ""),
    # mapped weights
    Mutant("arrays may end behind their file", MAPPED, "bytes <= size_ - offset", "bytes <= 2 * size_"),
    Mutant(
        "arrays may begin before their file",
        MAPPED,
        "offset >= static_cast<int64_t>(sizeof(std::size_t)) && ",
        "",
    ),
    Mutant(
        "arrays are read from behind their start",
        MAPPED,
        "mx::allocator::Buffer(start - front)",
        "mx::allocator::Buffer(start)",
    ),
    Mutant(
        "a mapping ends before its arrays",
        MAPPED,
        "[file = shared_from_this(), start, bytes](",
        "[start, bytes](",
    ),
    Mutant(
        "a copy is a view of the file",
        MAPPED,
        "  mx::array copy(plain.shape()",
        "  if (plain.size() > 0) return plain;\n  mx::array copy(plain.shape()",
    ),
    # products of bytes: attention
    Mutant(
        "scores forget that codes are scaled",
        KEYS,
        "largest / (kLargestByte * Code::kScale)",
        "largest / kLargestByte",
    ),
    Mutant(
        "a row alone gets the scales of other keys",
        KEYS,
        "_mm256_mul_ps(factors, _mm256_loadu_ps(scales))",
        "_mm256_mul_ps(factors, _mm256_set1_ps(*scales))",
    ),
    Mutant(
        "two rows get the scale of one key",
        KEYS,
        "_mm256_broadcast_ps(reinterpret_cast<const __m128*>(scales))",
        "_mm256_broadcast_ss(scales)",
    ),
    Mutant("every row has the first one's factor", KEYS, "of_rows[i * kRows / kSums]", "of_rows[0 * i]"),
    Mutant(
        "codes keep the offset that made them unsigned",
        KEYS,
        "(four[0] + four[1] + four[2] + four[3]) * Code::kLargestValue",
        "(four[0] + four[1] + four[2]) * Code::kLargestValue",
    ),
    Mutant(
        "queries and codes meet in another order",
        QUERIES,
        "to[i] = int8_t(fixed[2 * i]), to[kChunk / 2 + i] = int8_t(fixed[2 * i + 1])",
        "to[kChunk / 2 + i] = int8_t(fixed[2 * i]), to[i] = int8_t(fixed[2 * i + 1])",
    ),
    Mutant("queries are not rotated", QUERIES, "if (format.rotated) hadamard(row, dim);", ""),
    Mutant(
        "weighted sums forget that codes are scaled",
        WEIGHTS,
        "return unit * (1.0f / Code::kScale);",
        "return unit;",
    ),
    Mutant(
        "rounding errors of weights are lost",
        WEIGHTS,
        "fixed[i] = _mm256_sub_epi32(rounded, before);",
        "fixed[i] = _mm256_cvtps_epi32(_mm256_mul_ps(scaled[i], to_fixed));",
    ),
    Mutant(
        "sums of 16 bits overflow", WEIGHTS, "float(INT16_MAX / Code::kLargestValue - 4)", "float(INT16_MAX)"
    ),
    Mutant(
        "weights have half their bits",
        WEIGHTS,
        "constexpr float kLargestWeight = 254;",
        "constexpr float kLargestWeight = 15;",
    ),
    Mutant(
        "weights do not meet the scales of their rows",
        WEIGHTS,
        "_mm256_mul_ps(_mm256_loadu_ps(weights + 8 * i), _mm256_loadu_ps(scales + 8 * i))",
        "_mm256_mul_ps(_mm256_loadu_ps(weights + 8 * i), _mm256_loadu_ps(scales))",
    ),
    Mutant(
        "scales of hidden rows are read",
        CODES,
        "to[i] = mask >> i & 1 ? to[i] : 0.0f;",
        "to[i] = mask >> i & 1 ? to[i] : to[i] + 0.0f;",
    ),
    Mutant(
        "a row's scale passes for its lowest bits",
        CODES,
        "return dim == 0 ? bits & ~uint64_t(0xff) : bits;",
        "return bits;",
    ),
    Mutant("lowest bits are those of the first dims", CODES, "planes + dim / 8, 8", "planes, 8"),
    # products of bytes: attention over groups
    Mutant(
        "every group has the scale of its row's first ones",
        GROUP_KEYS,
        "scales[key * chunks + c]",
        "scales[key * chunks + 0 * c]",
    ),
    Mutant(
        "low bytes of queries are not multiplied",
        GROUP_KEYS,
        "products_of_four(bytes, rows + to_low + r * dim)",
        "products_of_four(bytes, rows + 0 * to_low + r * dim)",
    ),
    Mutant(
        "biases of keys meet another row's queries",
        GROUP_KEYS,
        "queries.sums + size_t(first) * chunks + c, chunks",
        "queries.sums + size_t(first) * chunks + c, 0",
    ),
    Mutant(
        "both stretches of a tile have the first one's weights",
        GROUP_VALUES,
        "_mm256_set1_ps(weights[kStretch + i])",
        "_mm256_set1_ps(weights[i])",
    ),
    Mutant(
        "groups of a chunk lie in another order",
        GROUP_CODES,
        "_mm_setr_epi32(-256, -254, -255, -253)",
        "_mm_setr_epi32(-256, -255, -254, -253)",
    ),
    Mutant(
        "the sign of a weight runs into its neighbour",
        GROUP_VALUES,
        "Code::kUnsigned ? _mm256_and_si256(fixed[2 * i], byte) : fixed[2 * i]",
        "fixed[2 * i]",
    ),
    Mutant(
        "signed weights do not fit a byte",
        GROUP_VALUES,
        "Code::kUnsigned ? 126 : kLargestWeight",
        "kLargestWeight",
    ),
    Mutant("biases are those of the chunk before", GROUP_KEYS, "= biases[c];", "= biases[c & ~1];"),
    # rows in registers
    Mutant(
        "ties of E2M1 go to the odd code",
        STORES,
        "count<_CMP_GE_OQ>(code, magnitude, seven_halves)",
        "count<_CMP_GT_OQ>(code, magnitude, seven_halves)",
    ),
    Mutant(
        "bf16 rows that round to infinity are stored",
        STORES,
        "return extent.finite && extent.largest <= 0x1.fefffep127f;",
        "return extent.finite;",
    ),
    Mutant(
        "one finite value makes a row finite",
        STORES,
        "finite = _mm256_movemask_ps(all) == 0xff;",
        "finite = _mm256_movemask_ps(all) != 0;",
    ),
    # products of bytes: linear layers
    Mutant(
        "biases meet half of the activations",
        ROWS,
        "static_cast<float>(quantized.even + quantized.odd)",
        "static_cast<float>(2 * quantized.even)",
    ),
    Mutant(
        "every block of a row has its first scale",
        ROWS,
        "out.scales[blocks_before + m] = quantized.scale;",
        "out.scales[blocks_before + m] = b == 0 ? quantized.scale\n"
        "    : out.scales[static_cast<std::size_t>(first) * out.blocks + m];",
    ),
    Mutant(
        "activations are rounded toward zero",
        ROWS,
        "_mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high))",
        "_mm256_packs_epi32(_mm256_cvttps_epi32(low), _mm256_cvttps_epi32(high))",
    ),
    Mutant(
        "a block that is not finite counts as finite",
        ROWS,
        "return {factor, limit / kMost + bad};",
        "return {factor, limit / kMost};",
    ),
    Mutant("sums of two activations overflow", ROWS, "if (pairs) {", "if (pairs && block == 0) {"),
    Mutant(
        "groups have the scales of their first",
        LINEAR,
        "if (inside == 0) load_parameters<F>",
        "if (b == 0) load_parameters<F>",
    ),
)
