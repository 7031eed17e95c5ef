"""Bugs in the native kernels' attention: products of bytes, also over pages with scales by groups."""

from __future__ import annotations

from mutant import bug

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
        "_mm256_mullo_epi16(sums, _mm256_set1_epi16(Code::kLargestValue))",
        "_mm256_mullo_epi16(sums, _mm256_set1_epi16(Code::kLargestValue - 1))",
    ),
    bug(
        "queries and codes meet in another order",
        "store256(to, _mm256_permute4x64_epi64(even, 0xd8));",
        "store256(to, _mm256_permute4x64_epi64(odd, 0xd8));",
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
    bug(
        "sums over a row's dims come out in another order",
        "Code::byte_at(16 + place), _mm256_permute2f128_ps(a, b, 0x31)",
        "Code::byte_at(16 + place), _mm256_permute2f128_ps(b, a, 0x31)",
    ),
    # products of bytes: attention over groups
    bug(
        "groups of keys have each other's scales",
        "0x0706030205040100",
        "0x0706050403020100",
    ),
    bug(
        "all dims of a query have the factor of the first ones",
        "of_groups[kChunks == 2 ? group_of_lane(lane) : lane / 2]",
        "of_groups[0]",
    ),
    bug(
        "codes of groups keep what made them unsigned",
        "_mm256_set1_epi32(-kShift<Code>)",
        "_mm256_set1_epi32(1 - kShift<Code>)",
    ),
    bug(
        "biases of keys are those of the first one",
        "scales.biases[of_key]",
        "scales.biases[first_key * runs]",
    ),
    bug(
        "both stretches of a tile have the first one's weights",
        "_mm256_loadu_ps(from + kStretch + i)",
        "_mm256_loadu_ps(from + i)",
    ),
    bug(
        "groups of a chunk lie in another order",
        "_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11",
        "_mm_setr_epi8(8, 9, 0, 1, 2, 3, 10, 11",
    ),
    bug(
        "weights lose what their fractions borrow",
        "_mm256_sub_epi8(_mm256_castps_si256(odd)",
        "_mm256_sub_epi32(_mm256_castps_si256(odd)",
    ),
    bug(
        "signed weights do not fit a byte",
        "Code::kUnsigned ? 126 : kLargestWeight",
        "kLargestWeight",
    ),
    bug("biases are those of the chunk before", "kChunks == 2 ? 3 : 1", "1"),
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

MUTANTS = (*ATTENTION, *GROUPS)
