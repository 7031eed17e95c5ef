from __future__ import annotations

from mutant import bug

ATTENTION = (
    # 8-bit products in attention
    bug(
        "scores forget that codes are scaled",
        "largest / (kLargestFixed<Code> * Code::kScale)",
        "largest / kLargestFixed<Code>",
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
)

CODES = (
    # products of codes at AVX-512
    bug(
        "queries do not fit a byte",
        "largest > 1e-30f ? float(queries.kLargest) / largest",
        "largest > 1e-30f ? 2 * float(queries.kLargest) / largest",
    ),
)

MUTANTS = (*ATTENTION, *CODES)
