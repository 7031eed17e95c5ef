"""Bugs in the native kernels: captured steps, checks of indices, mapped weights, products of bytes."""

from __future__ import annotations

from mutant import bug

STEPS = (
    # steps as programs
    bug(
        "a program computes with its first values",
        "std::memcpy(mx::array(*input).data<int32_t>(), from, 4 * input->size());",
        'if (each.size() == 0) throw std::invalid_argument("no values");',
    ),
    bug(
        "a program takes values of any number",
        "require(size == values.size(),",
        "require(size > 0,",
    ),
    bug(
        "a program runs its work once only",
        "for (const auto& task : tasks_) task();",
        "for (const auto& task : tasks_) task();\n  tasks_.clear();",
    ),
    bug("results are overwritten before they are read", "range->begin = taken.end;", "(void)taken.end;"),
    bug(
        "a range is too small for its array",
        "take(kLine + (bytes + kLine - 1) / kLine * kLine)",
        "take(kLine + bytes / 2 / kLine * kLine)",
    ),
    bug(
        "ranges that were read are not used again",
        "if (capture != capture_) return;",
        "if (capture >= 0) return;",
    ),
    bug(
        "memory grows with every capture",
        "for (Segment& segment : segments_) segment.free = {{0, segment.size}};",
        "",
    ),
    bug("arrays live as long as their capture", "std::exchange(order[i], nothing)", "order[i]"),
    bug(
        "weights a program reads are not held",
        "if (results.count(input.id()) == 0) read_.push_back(input);",
        "",
    ),
    bug(
        "siblings are recorded twice",
        "for (const mx::array& sibling : x.siblings()) seen.insert(sibling.id());",
        "",
    ),
    bug(
        "only first outputs depend on inputs",
        "for (const mx::array& output : x.outputs()) inputs.insert(output.id());\n    depends",
        "inputs.insert(x.id());\n    depends",
    ),
    bug(
        "constants are not computed",
        "if (!constants.empty()) evaluate(",
        "if (constants.size() > 1000) evaluate(",
    ),
    bug(
        "sums and products are taken for each other",
        '"Multiply") == 0, encoder',
        '"Multiply") != 0, encoder',
    ),
    bug(
        "arrays with gaps are reshaped as they lie",
        "const mx::array plain = row_contiguous(input, encoder);\n  mx::Strides",
        "const mx::array& plain = input;\n  mx::Strides",
    ),
    bug("sums take arrays with gaps as they lie", "right = row_contiguous(b, encoder)", "right = b"),
    bug(
        "results of MLX's are copied as they lie",
        "if (from.flags().row_contiguous) {",
        "if (from.flags().contiguous) {",
    ),
    bug(
        "memory that MLX reads begins at its buffer",
        "from.flags(), from.offset());",
        "from.flags(), 0);",
    ),
)

INDICES = (
    # indices
    bug("a slot behind the last page passes", "num_pages * page_size)", "num_pages * page_size + 1)"),
    bug(
        "a page behind the last passes",
        "all_below(step.page_table, num_pages)",
        "all_below(step.page_table, num_pages + 1)",
    ),
    bug(
        "lengths beyond the page table pass",
        "step.table_width * page_size + 1)",
        "step.table_width * page_size + 2)",
    ),
    bug("negative indices pass", "if (value < 0 || value >= limit)", "if (value >= limit)"),
    bug(
        "a sequence without rows passes",
        "step.q_start[b + 1] <= step.q_start[b]",
        "step.q_start[b + 1] < step.q_start[b]",
    ),
    bug("rows may begin anywhere", "step.q_start[0] != 0 || ", ""),
    bug("rows may end anywhere", " || step.q_start[sequences] != static_cast<int64_t>(tokens)", ""),
    bug(
        "a position behind its context passes",
        "step.positions[row] >= step.kv_len[b]",
        "step.positions[row] > step.kv_len[b]",
    ),
    bug("slots may be fewer than rows", "step.slots.size() != tokens ||", ""),
)

MAPPED = (
    # mapped weights
    bug("arrays may end behind their file", "bytes <= size_ - offset", "bytes <= 2 * size_"),
    bug(
        "arrays may begin before their file",
        "offset >= static_cast<int64_t>(sizeof(std::size_t)) && ",
        "",
    ),
    bug(
        "arrays are read from behind their start",
        "mx::allocator::Buffer(start - front)",
        "mx::allocator::Buffer(start)",
    ),
    bug(
        "a mapping ends before its arrays",
        "[file = shared_from_this(), start, bytes](",
        "[start, bytes](",
    ),
    bug(
        "a copy is a view of the file",
        "  mx::array copy(plain.shape()",
        "  if (plain.size() > 0) return plain;\n  mx::array copy(plain.shape()",
    ),
)

ATTENTION = (
    # products of bytes: attention
    bug(
        "scores forget that codes are scaled",
        "largest / (kLargestByte * Code::kScale)",
        "largest / kLargestByte",
    ),
    bug(
        "a row alone gets the scales of other keys",
        "_mm256_mul_ps(factors, _mm256_loadu_ps(scales))",
        "_mm256_mul_ps(factors, _mm256_set1_ps(*scales))",
    ),
    bug(
        "two rows get the scale of one key",
        "_mm256_broadcast_ps(reinterpret_cast<const __m128*>(scales))",
        "_mm256_broadcast_ss(scales)",
    ),
    bug("every row has the first one's factor", "of_rows[i * kRows / kSums]", "of_rows[0 * i]"),
    bug(
        "codes keep the offset that made them unsigned",
        "(four[0] + four[1] + four[2] + four[3]) * Code::kLargestValue",
        "(four[0] + four[1] + four[2]) * Code::kLargestValue",
    ),
    bug(
        "queries and codes meet in another order",
        "to[i] = int8_t(fixed[2 * i]), to[kChunk / 2 + i] = int8_t(fixed[2 * i + 1])",
        "to[kChunk / 2 + i] = int8_t(fixed[2 * i]), to[i] = int8_t(fixed[2 * i + 1])",
    ),
    bug(
        "queries are not rotated",
        "if (format.rotated) hadamard(row, format.dim);\n}\n\n// A row's integers",
        "}\n\n// A row's integers",
    ),
    bug(
        "weighted sums forget that codes are scaled",
        "return unit * (1.0f / Code::kScale);",
        "return unit;",
    ),
    bug(
        "rounding errors of weights are lost",
        "fixed[i] = _mm256_sub_epi32(rounded, before);\n    before = rounded;",
        "fixed[i] = _mm256_cvtps_epi32(_mm256_mul_ps(scaled[i], to_fixed));",
    ),
    bug("sums of 16 bits overflow", "float(INT16_MAX / Code::kLargestValue - 4)", "float(INT16_MAX)"),
    bug(
        "weights have half their bits",
        "constexpr float kLargestWeight = 254;",
        "constexpr float kLargestWeight = 15;",
    ),
    bug(
        "weights do not meet the scales of their rows",
        "_mm256_mul_ps(_mm256_loadu_ps(weights + 8 * i), _mm256_loadu_ps(scales + 8 * i));\n"
        "  const float top =",
        "_mm256_mul_ps(_mm256_loadu_ps(weights + 8 * i), _mm256_loadu_ps(scales));\n  const float top =",
    ),
    bug(
        "scales of hidden rows are read",
        "to[i] = mask >> i & 1 ? to[i] : 0.0f;",
        "to[i] = mask >> i & 1 ? to[i] : to[i] + 0.0f;",
    ),
    bug(
        "a row's scale passes for its lowest bits",
        "return dim == 0 ? bits & ~uint64_t(0xff) : bits;",
        "return bits;",
    ),
    bug("lowest bits are those of the first dims", "planes + dim / 8, 8", "planes, 8"),
    # products of bytes: attention over groups
    bug(
        "every group has the scale of its row's first ones",
        "scales[key * chunks + c]",
        "scales[key * chunks + 0 * c]",
    ),
    bug(
        "all dims of a query have the factor of the first ones",
        "factors[(c * kChunk + 8 * lane) / kFactorDims]",
        "factors[0]",
    ),
    bug(
        "codes of groups keep what made them unsigned",
        "float(-sum * kShift<Code>) * factor",
        "float(-sum * (kShift<Code> - 1)) * factor",
    ),
    bug(
        "biases of keys meet another row's queries",
        "queries.sums + size_t(first) * chunks + c, chunks), total);\n    store_scores",
        "queries.sums + size_t(first) * chunks + c, 0), total);\n    store_scores",
    ),
    bug(
        "both stretches of a tile have the first one's weights",
        "_mm256_set1_ps(weights[kStretch + i])",
        "_mm256_set1_ps(weights[i])",
    ),
    bug(
        "groups of a chunk lie in another order",
        "_mm_setr_epi32(-256, -254, -255, -253)",
        "_mm_setr_epi32(-256, -255, -254, -253)",
    ),
    bug(
        "the sign of a weight runs into its neighbour",
        "Code::kUnsigned ? _mm256_and_si256(fixed[2 * i], byte) : fixed[2 * i]",
        "fixed[2 * i]",
    ),
    bug(
        "signed weights do not fit a byte",
        "Code::kUnsigned ? 126 : kLargestWeight",
        "kLargestWeight",
    ),
    bug("biases are those of the chunk before", "= biases[c];", "= biases[c & ~1];"),
)

GROUPS = (
    # products of bytes: attention over groups, AVX-512
    bug(
        "a query's dims share the factor of its largest",
        "largest = largest_of(row + first, in_step);",
        "largest = largest_of(row, dim);",
    ),
    bug(
        "the bits of a float lose the sum's offset",
        "kMagicBits : 0u) - uint32_t(sum) * Code::kOffset;",
        "kMagicBits : 0u);",
    ),
    bug(
        "few rows multiply without the start of their sums",
        "if constexpr (Code::kOffset != 0 || kOwnFactors<Code>)\n",
        "if constexpr (Code::kOffset != 0 && !kOwnFactors<Code>)\n",
    ),
    bug(
        "biases of keys meet the queries of another group",
        "_mm512_set1_ps(group_sums[step / kSteps])",
        "_mm512_set1_ps(group_sums[0 * step])",
    ),
    bug(
        "queries do not fit a byte",
        "factor = with_zeros(largest / float(queries.kLargest));",
        "factor = 0.5f * with_zeros(largest / float(queries.kLargest));",
    ),
    bug(
        "two blocks of a group have the first one's weights",
        "_mm512_mask_mov_epi32(spread, 0xf0f0, four(1))",
        "_mm512_mask_mov_epi32(spread, 0xf0f0, four(0))",
    ),
    bug(
        "the bytes of a group's second block are those of its first",
        "_mm512_shuffle_i32x4(bytes, bytes, 0xf5)",
        "_mm512_shuffle_i32x4(bytes, bytes, 0xa0)",
    ),
    bug(
        "signed weights of one byte do not fit",
        "(Code::kAffine ? 126.0f : 254.0f)",
        "254.0f",
    ),
    bug(
        "rounding errors of a group's weights are lost",
        "fixed[quad] = _mm512_sub_epi32(rounded, before);",
        "fixed[quad] = _mm512_cvtps_epi32(_mm512_mul_ps(scaled[batch][quad], to_fixed));",
    ),
    bug(
        "scales of a set are those of the first",
        "to.scales + set * kVectors * kPer<Code>;",
        "to.scales + 0 * set * kVectors * kPer<Code>;",
    ),
)

STORES = (
    # rows in registers
    bug(
        "ties of E2M1 go to the odd code",
        "count<_CMP_GE_OQ>(code, magnitude, seven_halves)",
        "count<_CMP_GT_OQ>(code, magnitude, seven_halves)",
    ),
    bug(
        "bf16 rows that round to infinity are stored",
        "return extent.finite && extent.largest <= 0x1.fefffep127f;",
        "return extent.finite;",
    ),
    bug(
        "one finite value makes a row finite",
        "finite = _mm256_movemask_ps(all) == 0xff;",
        "finite = _mm256_movemask_ps(all) != 0;",
    ),
)

LINEAR = (
    # products of bytes: linear layers
    bug(
        "biases meet half of the activations",
        "static_cast<float>(quantized.even + quantized.odd)",
        "static_cast<float>(2 * quantized.even)",
    ),
    bug(
        "every block of a row has its first scale",
        "out.scales[blocks_before + m] = quantized.scale;",
        "out.scales[blocks_before + m] = b == 0 ? quantized.scale\n"
        "    : out.scales[static_cast<std::size_t>(first) * out.blocks + m];",
    ),
    bug(
        "activations are rounded toward zero",
        "_mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high))",
        "_mm256_packs_epi32(_mm256_cvttps_epi32(low), _mm256_cvttps_epi32(high))",
    ),
    bug(
        "a block that is not finite counts as finite",
        "return {factor, limit / kMost + bad};",
        "return {factor, limit / kMost};",
    ),
    bug("sums of two activations overflow", "if (pairs) {", "if (pairs && block == 0) {"),
    bug(
        "groups have the scales of their first",
        "const int inside = k % shape.group;\n    if (inside == 0)",
        "const int inside = k % shape.group;\n    if (b == 0)",
    ),
)

CHANNELS = (
    # one scale per output, AVX-512
    bug(
        "4-bit codes of few rows lose their zeros",
        "_mm512_add_epi32(_mm512_loadu_si512(to), _mm512_add_epi32(product, shift))",
        "_mm512_add_epi32(_mm512_loadu_si512(to), product)",
    ),
    bug(
        "outputs have the factors of the first",
        "const __m512i factor = spread16(factors + n, 0x00010001);",
        "const __m512i factor = spread16(factors, 0x00010001);",
    ),
    bug(
        "any scales are multiples of one of the channel",
        "if (factor * unit != scale || -zero * scale != bias) return false;",
        "",
    ),
)

POOLS = (
    # attention over two pools
    bug(
        "what one pool gives lies at rows of another head",
        "int64_t(first_item.first_token) * num_heads + first_item.kv_head * group;",
        "int64_t(first_item.first_token) * num_heads;",
    ),
    bug("rows that are cut join nothing", "first.merge();\n", ""),
    bug(
        "sinks are lost where pools are joined",
        "if (sink != nullptr) total += scalar_exp2(of_sink - top);\n",
        "",
    ),
    bug("a maximum that lags behind stays there", "kHeadroom = 8;", "kHeadroom = 1e9;"),
    bug(
        "the upper half of a tile has the weights of the lower",
        "softmax_update_span<Span<kVectors / 2, kVectors>>",
        "softmax_update_span<Span<0, kVectors / 2>>",
    ),
    bug(
        "rows see what the first of sixteen sees",
        "if (in_group == 0 || row == first)\n        seen =",
        "if (row == first)\n        seen =",
    ),
)

ROWS = (
    # row operations; which rows are computed
    bug(
        "a node whose other output is needed whole is computed again",
        "for (const mx::array& sibling : node.siblings()) shared_.insert(sibling.id());",
        "",
    ),
    bug(
        "subnormal results become zero",
        "return _mm512_fpclass_ps_mask(values, kSubnormal) != 0;",
        "return _mm512_fpclass_ps_mask(values, kSubnormal) > 0xffff;",
    ),
    bug(
        "heads turn by the sines of the first lanes",
        "sine = _mm512_loadu_ps(angles + 16 * (kHalf + i));",
        "sine = _mm512_loadu_ps(angles + 16 * kHalf);",
    ),
)

SAMPLING = (
    # tokens drawn from logits
    bug(
        "where a nucleus ends is what the guess says",
        "if (inside.above >= target || inside.above + inside.mass() < target) {",
        "if (inside.count < 0) {",
    ),
    bug(
        "all ties at the end of a nucleus belong to it",
        "found.kept = needed_ties(above, target, found.weight, found.ties);",
        "found.kept = found.ties;",
    ),
    bug(
        "log probabilities are those at the temperature",
        "const bool are_powers = call.temperature == 1 &&",
        "const bool are_powers = call.temperature > 0 &&",
    ),
    bug(
        "a block's largest logit does not change",
        "else for_each_changed(call.changes, [&](int64_t id) { row.scan(",
        "else for_each_changed(call.changes, [&](int64_t id) { if (id < 0) row.scan(",
    ),
    bug(
        "exact logits are in the order of their last bytes",
        "constexpr int kDigits = 4, kValues = 256, kFew = 100;",
        "constexpr int kDigits = 2, kValues = 256, kFew = 100;",
    ),
    bug(
        "what 16 bits do not hold is not among the likeliest",
        "if (substituted[at / kTopBlock] > bound) return true;",
        "if (substituted[at / kTopBlock] > bound + 1000) return true;",
    ),
)

MUTANTS = (
    *STEPS,
    *INDICES,
    *MAPPED,
    *ATTENTION,
    *GROUPS,
    *STORES,
    *LINEAR,
    *CHANNELS,
    *POOLS,
    *ROWS,
    *SAMPLING,
)
