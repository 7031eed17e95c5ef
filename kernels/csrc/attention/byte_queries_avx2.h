// Queries in fixed point for integer products, relative to the largest element of a row.
#pragma once

#include <algorithm>

#include "attention/bytes_avx2.h"
#include "attention/rows.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kLargestByte = 127, kLargestWord = 32767;  // largest fixed-point values

// Returns the largest magnitude of a row; NaNs are ignored.
inline float largest_of(const float* row, int dim) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 top = _mm256_setzero_ps();
  for (int d = 0; d < dim; d += 8) top = _mm256_max_ps(_mm256_andnot_ps(sign, _mm256_loadu_ps(row + d)), top);
  return octavo::largest_lane((Vec)top);
}

// Scales `dim` elements to integers in [-limit, limit]; returns the largest magnitude, which became `limit`.
inline float fix_elements(const float* row, int dim, int limit, int32_t* fixed) {
  const float largest = largest_of(row, dim);
  const __m256 to_fixed = _mm256_set1_ps(largest > 1e-30f ? float(limit) / largest : 0.0f);
  for (int d = 0; d < dim; d += 8)
    store256(fixed + d, _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(row + d), to_fixed)));
  return largest;
}

inline void load_query(const AttendArgs& args, const AttendItem& item, int r, float* row) {
  const RowFormat& format = args.layout.k;
  const int group = group_size(args);
  load_row(args.queries, item.first_token + r / group, item.kv_head * group + r % group, format.dim, row);
  if (format.rotated) hadamard(row, format.dim);
}

// Loads a row and scales it to [-limit, limit]; returns the largest magnitude, which became `limit`.
inline float fix_query(const AttendArgs& args, const AttendItem& item, int r, int limit, int32_t* fixed) {
  alignas(64) float row[kMaxDim];
  load_query(args, item, r, row);
  return fix_elements(row, args.layout.k.dim, limit, fixed);
}

// Packs 32 integers as bytes.
OCTAVO_INLINE __m256i as_bytes(const int32_t* fixed) {
  __m256i eight[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) eight[i] = _mm256_and_si256(load256(fixed + 8 * i), _mm256_set1_epi32(255));
  const __m256i fours =
      _mm256_packus_epi16(_mm256_packus_epi32(eight[0], eight[1]), _mm256_packus_epi32(eight[2], eight[3]));
  return _mm256_permutevar8x32_epi32(fours, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// Returns the sums of every four adjacent signed bytes.
OCTAVO_INLINE __m256i sums_of_four(__m256i bytes) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
