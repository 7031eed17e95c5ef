"""Bugs in the native kernels: captured steps, checks of indices, mapped weights, products of bytes."""

from __future__ import annotations

import in_native_attention
from mutant import bug

STEPS = (
    # steps as programs
    bug(
        "a program computes with its first values",
        "std::memcpy(inputs[input].memory, from, sizeof(int32_t) * inputs[input].size);",
        "continue;",
    ),
    bug(
        "a program runs its work once only",
        "for (const auto& task : tasks_) task();",
        "for (const auto& task : tasks_) task();\n  tasks_.clear();",
    ),
    bug(
        "a range is too small for its array",
        "take(kLine + (bytes + kLine - 1) / kLine * kLine)",
        "take(kLine + bytes / 2 / kLine * kLine)",
    ),
    bug(
        "memory grows with every capture",
        "for (Segment& segment : segments_) segment.free = {{0, segment.size}};",
        "",
    ),
    bug(
        "weights a program reads are not held",
        "if (results.count(input.id()) == 0) read_.push_back(input);",
        "",
    ),
    bug(
        "only first outputs depend on inputs",
        "for (const mx::array& output : x.outputs()) inputs.insert(output.id());\n    depends",
        "inputs.insert(x.id());\n    depends",
    ),
    bug(
        "sums and products are taken for each other",
        '"Multiply") == 0, encoder',
        '"Multiply") != 0, encoder',
    ),
    bug("sums take arrays with gaps as they lie", "right = row_contiguous(b, encoder)", "right = b"),
    bug(
        "memory that MLX reads begins at its buffer",
        "from.flags(), from.offset());",
        "from.flags(), 0);",
    ),
)

INDICES = (
    # indices
    bug(
        "a slot behind the last page passes",
        "step.slots, num_pages * page_size)",
        "step.slots, num_pages * page_size + 1)",
    ),
    bug(
        "lengths beyond the page table pass",
        "step.table_width * page_size + 1)",
        "step.table_width * page_size + 2)",
    ),
    bug(
        "a sequence without rows passes",
        "step.q_start[b + 1] <= step.q_start[b]",
        "step.q_start[b + 1] < step.q_start[b]",
    ),
    bug("rows may end anywhere", " || step.q_start[sequences] != static_cast<int64_t>(tokens)", ""),
    bug("slots may be fewer than rows", "step.slots.size() != tokens ||", ""),
)

MAPPED = (
    # mapped weights
    bug("arrays may end behind their file", "bytes <= size_ - offset", "bytes <= 2 * size_"),
    bug(
        "arrays are read from behind their start",
        "mx::allocator::Buffer(start - front)",
        "mx::allocator::Buffer(start)",
    ),
    bug(
        "a copy is a view of the file",
        "  mx::array copy(plain.shape()",
        "  if (plain.size() > 0) return plain;\n  mx::array copy(plain.shape()",
    ),
)

STORES = (
    # rows in registers
    bug(
        "ties of E2M1 go to the odd code",
        "(magnitude > scale * 2.5f) + (magnitude >= scale * 3.5f)",
        "(magnitude > scale * 2.5f) + (magnitude > scale * 3.5f)",
    ),
    bug(
        "one finite value makes a row finite",
        "finite &= magnitude <= kLargest;",
        "finite |= magnitude <= kLargest;",
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
        "activations are rounded toward zero",
        "_mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high))",
        "_mm256_packs_epi32(_mm256_cvttps_epi32(low), _mm256_cvttps_epi32(high))",
    ),
    bug("sums of two activations overflow", "if (pairs) {", "if (pairs && block == 0) {"),
)

CHANNELS = (
    # one scale per output, AVX-512
    bug(
        "4-bit codes of few rows lose their zeros",
        "_mm512_mullo_epi32(start, _mm512_set1_epi32(x_sum))",
        "_mm512_setzero_si512()",
    ),
    bug(
        "rows of bf16 lose the last inputs of a panel",
        "for (int pair = 0; pair < all; pair += shared)",
        "for (int pair = 0; pair + shared <= all; pair += shared)",
    ),
    bug(
        "outputs have the factors of the first",
        "const __m512i factor = spread16(factors + n, 0x00010001);",
        "const __m512i factor = spread16(factors, 0x00010001);",
    ),
)

QUANTIZED = (
    # weights with one scale per output channel, while loading
    bug("NaN has some code", "shifted & (UintVec)(exact == exact) & 0xff", "shifted & 0xff"),
    bug(
        "the least weight does not bound a channel",
        "std::max(range.most, -range.least) / 115",
        "range.most / 115",
    ),
    bug(
        "a dequantized weight is rounded once",
        "* scale;\n  }\n  round_floats(call.type, call.group, values);",
        "* scale;\n  }",
    ),
)

AFFINE = (
    # weights in MLX's affine format, while loading
    bug(
        "NaN spreads to its group",
        "low = x < low ? x : low;\n    high = x > high ? x : high;",
        "low = low < x ? low : x;\n    high = high > x ? high : x;",
    ),
    bug(
        "a group of one value has no step",
        "std::max((most - least) / largest_code, 1e-7f)",
        "(most - least) / largest_code",
    ),
    bug("two bits of four codes are three", "x | x >> 6 | x >> 12 | x >> 18", "x | x >> 6 | x >> 12"),
)

PACKED = (
    # quantized weights in the kernels' layout
    bug(
        "nibbles stay where they are",
        "words = (words & 0xff0000ff)",
        "words = true ? words : (words & 0xff0000ff)",
    ),
    bug(
        "biases are those of the first part",
        "biases.push_back({part.biases, part.outputs});",
        "biases.push_back({parts[0].biases, part.outputs});",
    ),
)

POOLS = (
    # attention over two pools
    bug(
        "what one pool gives lies at rows of another head",
        "int64_t(first_item.first_token) * num_heads + first_item.kv_head * group;",
        "int64_t(first_item.first_token) * num_heads;",
    ),
    bug(
        "sinks are lost where pools are joined",
        "if (sink != nullptr) total += scalar_exp2(of_sink - top);\n",
        "",
    ),
    bug(
        "the upper half of a tile has the weights of the lower",
        "softmax_update_span<Span<kVectors / 2, kVectors>>",
        "softmax_update_span<Span<0, kVectors / 2>>",
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
        "heads turn by the sines of the first lanes",
        "sine = _mm512_loadu_ps(angles + 16 * (kHalf + i));",
        "sine = _mm512_loadu_ps(angles + 16 * kHalf);",
    ),
)

SAMPLING = (
    # tokens drawn from logits
    bug(
        "what may end a nucleus is sought too low",
        "if (end == 0 && most >= top_p * whole) end = at + 1;",
        "if (end == 0 && most >= 1.5 * top_p * whole) end = at + 1;",
    ),
    bug(
        "log probabilities are those at the temperature",
        "const bool are_powers = call.temperature == 1 &&",
        "const bool are_powers = call.temperature > 0 &&",
    ),
    bug(
        "half of a row of 16-bit logits becomes floats",
        "load_floats(row.logits, row.type, 0, row.size, floats);",
        "load_floats(row.logits, row.type, 0, row.size / 2, floats);",
    ),
)

MUTANTS = (
    *STEPS,
    *INDICES,
    *MAPPED,
    *in_native_attention.MUTANTS,
    *STORES,
    *LINEAR,
    *CHANNELS,
    *QUANTIZED,
    *AFFINE,
    *PACKED,
    *POOLS,
    *ROWS,
    *SAMPLING,
)
