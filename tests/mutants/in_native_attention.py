from __future__ import annotations

from mutant import bug

ATTENTION = (
    # 8-bit products in attention
    bug(
        "scores forget that codes are scaled",
        "largest / (kLargestByte * Code::kScale)",
        "largest / kLargestByte",
    ),
    bug(
        "codes keep the offset that made them unsigned",
        "_mm256_mullo_epi16(sums, _mm256_set1_epi16(Code::kLargestValue))",
        "_mm256_mullo_epi16(sums, _mm256_set1_epi16(Code::kLargestValue - 1))",
    ),
    bug(
        "rounding errors of weights are lost",
        "fixed[i] = _mm256_sub_epi32(rounded, before);\n    before = rounded;",
        "fixed[i] = _mm256_cvtps_epi32(_mm256_mul_ps(scaled[i], to_fixed));",
    ),
    bug(
        "scales of hidden rows are read",
        "to[i] = mask >> i & 1 ? to[i] : 0.0f;",
        "to[i] = mask >> i & 1 ? to[i] : to[i] + 0.0f;",
    ),
    # 8-bit products in attention over groups
    bug(
        "groups of keys have each other's scales",
        "0x0706030205040100",
        "0x0706050403020100",
    ),
    bug(
        "both stretches of a tile have the first one's weights",
        "_mm256_loadu_ps(from + kStretch + i)",
        "_mm256_loadu_ps(from + i)",
    ),
)

GROUPS = (
    # 8-bit products in attention over groups, AVX-512
    bug(
        "a query's dims share the factor of its largest",
        "largest = largest_of(row + first, in_step);",
        "largest = largest_of(row, dim);",
    ),
    bug(
        "queries do not fit a byte",
        "factor = with_zeros(largest / float(queries.kLargest));",
        "factor = 0.5f * with_zeros(largest / float(queries.kLargest));",
    ),
    bug(
        "rounding errors of a group's weights are lost",
        "fixed[quad] = _mm512_sub_epi32(rounded, before);",
        "fixed[quad] = _mm512_cvtps_epi32(_mm512_mul_ps(scaled[b][quad], to_fixed));",
    ),
)

MUTANTS = (*ATTENTION, *GROUPS)
