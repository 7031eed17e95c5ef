// Queries in 8-bit fixed point of their row's largest element, or of that of each kFactorDims dims, for
// products of bytes.
#pragma once

#include <algorithm>

#include "attention/bytes_avx2.h"
#include "attention/rows.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kLargestByte = 127;

// The largest magnitude of a row; NaNs do not count.
inline float largest_of(const float* row, int dim) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 top = _mm256_setzero_ps();
  for (int d = 0; d < dim; d += 8) top = _mm256_max_ps(_mm256_andnot_ps(sign, _mm256_loadu_ps(row + d)), top);
  return largest_lane(top);
}

// `dim` elements as integers in [-limit, limit], and what `limit` stands for.
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

// A row's integers in [-limit, limit], in the order of its dims, and what `limit` stands for.
inline float fix_query(const AttendArgs& args, const AttendItem& item, int r, int limit, int32_t* fixed) {
  alignas(64) float row[kMaxDim];
  load_query(args, item, r, row);
  return fix_elements(row, args.layout.k.dim, limit, fixed);
}

constexpr int kFactorDims = 16;

// The same with a limit of kLargestByte and, of each kFactorDims dims, what one stands for.
inline void fix_query_in_parts(const AttendArgs& args, const AttendItem& item, int r, int32_t* fixed,
                               float* factors) {
  alignas(64) float row[kMaxDim];
  load_query(args, item, r, row);
  for (int d = 0; d < args.layout.k.dim; d += kFactorDims)
    *factors++ = fix_elements(row + d, kFactorDims, kLargestByte, fixed + d) * (1.0f / kLargestByte);
}

// A chunk of them as bytes, in the order of an expanded chunk.
inline void store_chunk(const int32_t* fixed, int8_t* to) {
  for (int i = 0; i < kChunk / 2; ++i)
    to[i] = int8_t(fixed[2 * i]), to[kChunk / 2 + i] = int8_t(fixed[2 * i + 1]);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
