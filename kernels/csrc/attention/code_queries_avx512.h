// Queries for pages of codes (attention/codes_avx512.h) in fixed point, relative to the largest element of
// their row.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention/codes_avx512.h"
#include "attention/rows.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Each row has `dim` high bytes and, if kParts is 2, `dim` low bytes. Then come a factor per row, and a sum
// that corrects for kLargestValue.
template <class Code>
struct Queries {
  static constexpr int kLargest = Code::kParts == 2 ? 127 * 256 + 127 : 127;  // the (high) bytes are signed
  int8_t* bytes;
  float* factors;
  int32_t* sums;

  Queries(void* memory, int dim, int num_rows)
      : bytes(static_cast<int8_t*>(memory)),
        factors(reinterpret_cast<float*>(bytes + round_up64(size_t(num_rows) * Code::kParts * dim + 16))),
        sums(reinterpret_cast<int32_t*>(factors + num_rows)) {}
};

template <class Code>
size_t query_bytes(int dim, int num_rows) {
  return round_up64(size_t(num_rows) * Code::kParts * dim + 16) + size_t(num_rows) * 8;
}

// Returns the largest magnitude of a row, which is padded with zeros to whole vectors; NaNs are ignored.
OCTAVO_INLINE float largest_of(const float* row, int dim) {
  __m512 top = _mm512_setzero_ps();
  for (int d = 0; d < dim; d += 16) top = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(row + d)), top);
  return _mm512_reduce_max_ps(top);
}

// Orders dims like the panel, which has a word's low nibbles before its high ones: 0 2 4 6, then 1 3 5 7.
template <class Code>
OCTAVO_INLINE __m128i in_panel_order(__m128i bytes) {
  if constexpr (Code::kBits == 8) return bytes;
  alignas(16) static constexpr int8_t kOrder[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
  return _mm_shuffle_epi8(bytes, _mm_load_si128(reinterpret_cast<const __m128i*>(kOrder)));
}

// Converts a row of floats, padded with zeros to whole vectors; `largest` is its largest magnitude.
template <class Code>
OCTAVO_INLINE void fix_query(const Queries<Code>& queries, int r, int dim, const float* row, float largest) {
  alignas(64) int32_t fixed[Code::kParts == 2 ? kMaxDim + 16 : 16];
  int8_t* const high = queries.bytes + size_t(r) * Code::kParts * dim;
  const __m512 to_fixed = _mm512_set1_ps(largest > 1e-30f ? float(queries.kLargest) / largest : 0.0f);
  __m512i sums = _mm512_setzero_si512();
  for (int d = 0; d < dim; d += 16) {
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(row + d), to_fixed));
    __m512i upper = rounded;
    if constexpr (Code::kParts == 2) {
      upper = _mm512_srai_epi32(_mm512_add_epi32(rounded, _mm512_set1_epi32(128)), 8);
      _mm512_store_si512(fixed + d, rounded);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + d), in_panel_order<Code>(_mm512_cvtepi32_epi8(upper)));
    sums = _mm512_add_epi32(sums, rounded);
  }
  queries.sums[r] = _mm512_reduce_add_epi32(sums);
  queries.factors[r] = largest / float(queries.kLargest) * (1.0f / Code::kScale);
  for (int d = 0; Code::kParts == 2 && d < dim; d += 16)  // low bytes last, over the padding of high bytes
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + dim + d),
                     in_panel_order<Code>(_mm512_cvtepi32_epi8(_mm512_load_si512(fixed + d))));
}

constexpr int kQueryRows = 8;  // most rows that are loaded together

// Rotates and converts several rows alternately, because the steps for one row depend on each other.
template <class Code>
void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
  constexpr int kFloats = 2 * (kMaxDim + 16);
  const int num_rows = item.num_tokens * group_size(args), dim = args.layout.k.dim;
  const int stride = dim + 16, together = std::min(kQueryRows, kFloats / stride);
  const Queries<Code> queries(memory, dim, num_rows);
  alignas(64) float rows[kFloats];
  float largest[kQueryRows];
  for (int first = 0; first < num_rows; first += together) {
    const int count = std::min(together, num_rows - first);
    for (int i = 0; i < count; ++i) {
      load_query(args, item, first + i, rows + i * stride);
      std::fill_n(rows + i * stride + dim, stride - dim, 0.0f);
    }
    for (int i = 0; i < count; ++i) largest[i] = largest_of(rows + i * stride, dim);
    for (int i = 0; i < count; ++i) fix_query(queries, first + i, dim, rows + i * stride, largest[i]);
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
