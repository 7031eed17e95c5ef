// Products of kRows query rows with 8 / kRows keys: eight vectors, which are reduced to eight scores at once.
#pragma once

#include <cstring>

#include "attention/codes_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kSums = 8;  // sums reduced together: kRows rows times 8 / kRows keys

// Returns eight sums, each over the eight lanes of one vector.
OCTAVO_INLINE __m256 reduce(const __m256 (&sums)[kSums]) {
  __m256 two[4], four[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    two[i] = _mm256_add_ps(_mm256_unpacklo_ps(sums[2 * i], sums[2 * i + 1]),
                           _mm256_unpackhi_ps(sums[2 * i], sums[2 * i + 1]));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    four[i] = _mm256_add_ps(_mm256_shuffle_ps(two[2 * i], two[2 * i + 1], 0x44),
                            _mm256_shuffle_ps(two[2 * i], two[2 * i + 1], 0xee));
  return _mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20),
                       _mm256_permute2f128_ps(four[0], four[1], 0x31));
}

// Loads one number per row into the lanes of all keys.
template <int kRows>
OCTAVO_INLINE __m256 spread_rows(const float* of_rows) {
  float all[kSums];
  for (int i = 0; i < kSums; ++i) all[i] = of_rows[i * kRows / kSums];
  return _mm256_loadu_ps(all);
}

// Loads one number per key into the lanes of all rows.
template <int kRows>
OCTAVO_INLINE __m256 spread_keys(const float* of_keys) {
  if constexpr (kRows == 1) return _mm256_loadu_ps(of_keys);
  if constexpr (kRows == 2) return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(of_keys));
  return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(of_keys)));
}

template <int kRows>
OCTAVO_INLINE void store_scores(__m256 values, float* scores) {
  float all[kSums];
  _mm256_storeu_ps(all, values);
  for (int r = 0; r < kRows; ++r)
    std::memcpy(scores + r * kTileTokens, all + r * kSums / kRows, 4 * kSums / kRows);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
