// Rows to int8, int4, mxfp4, nvfp4, affine8 and affine4 on AVX-512: the operations of pages/quantize.h, 16
// values at a time. Internal linkage.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "pages/codes.h"
#include "pages/quantize_avx512.h"
#include "pages/quantize_row.h"

namespace octavo {
namespace {

// Whether all values are finite, and their largest magnitude.
struct Extent {
  bool finite;
  float largest;

  Extent(const float* row, int dim) {
    const __m512 limit = _mm512_set1_ps(3.402823466e38f);
    __m512 top = _mm512_setzero_ps();
    __mmask16 all = 0xffff;
    for (int i = 0; i < dim; i += 16) {
      const __m512 magnitude = _mm512_abs_ps(_mm512_loadu_ps(row + i));
      all &= _mm512_cmp_ps_mask(magnitude, limit, _CMP_LE_OQ);
      top = _mm512_max_ps(magnitude, top);
    }
    finite = all == 0xffff;
    largest = _mm512_reduce_max_ps(top);
  }
};

// The integers nearest to values / step, ties to even, between two limits; as codes of kBits. Limits are
// integers, so that it does not matter which comes first, and what is too large for an integer never is one.
template <int kBits>
inline __attribute__((always_inline)) void store_quotients(__m512 values, __m512 step, __m512 lowest,
                                                           __m512 highest, uint8_t* codes) {
  const __m512 quotient = _mm512_div_ps(values, step);
  const __m512i integers = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(quotient, lowest), highest));
  if constexpr (kBits == 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(integers));
  else store_nibbles(_mm512_and_si512(integers, _mm512_set1_epi32(15)), codes);
}

// dim: a multiple of 16
template <int kBits>
inline bool store_integers_of(const float* row, int dim, uint8_t* codes, uint8_t* scale) {
  const Extent extent(row, dim);
  if (!extent.finite) return false;
  const float stored = store_integer_scale(extent.largest, kBits, dim, codes, scale);
  if (stored == 0) return true;
  const __m512 step = _mm512_set1_ps(stored);
  const __m512 lowest = _mm512_set1_ps(lowest_integer(kBits));
  const __m512 highest = _mm512_set1_ps(highest_integer(kBits));
  for (int i = 0; i < dim; i += 16)
    store_quotients<kBits>(_mm512_loadu_ps(row + i), step, lowest, highest, codes + i * kBits / 8);
  return true;
}

// Groups of 16 kVectors values of E2M1 codes; `to_scale` makes a group's byte, `of_scale` a float of it.
template <int kVectors, class ToScale, class OfScale>
inline bool store_e2m1_groups(const float* row, int dim, uint8_t* codes, uint8_t* scales, ToScale to_scale,
                              OfScale of_scale) {
  if (!Extent(row, dim).finite) return false;
  for (int at = 0; at < dim; at += 16 * kVectors, row += 16 * kVectors, ++scales) {
    const Magnitudes<kVectors> x(row);
    *scales = to_scale(x.largest);
    const float scale = of_scale(*scales);
    const ScaledGrid<3> grid(kE2m1Grid, scale);
    for (int i = 0; i < kVectors; ++i, codes += 8) {
      const __m512i signed_codes = with_sign(grid.index(x.at[i]), x.negative[i]);
      store_nibbles(scale == 0 ? _mm512_setzero_si512() : signed_codes, codes);
    }
  }
  return true;
}

// Codes are made with the step and bias before these round to fp16. Which zero the lowest and the highest of
// a group are, if they are zeros, makes no difference: a bias is then 0.
template <int kBits>
inline bool store_affine_group_of(const float* row, uint8_t* codes, uint8_t* scales) {
  constexpr float kMost = kBits == 8 ? 255.0f : 15.0f;
  constexpr int kVectors = kAffineGroup / 16;
  __m512 x[kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) x[i] = _mm512_loadu_ps(row + 16 * i);
  const __m512 lows = _mm512_min_ps(_mm512_min_ps(x[0], x[1]), _mm512_min_ps(x[2], x[3]));
  const __m512 highs = _mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3]));
  const AffineGroup group(_mm512_reduce_min_ps(lows), _mm512_reduce_max_ps(highs), kMost);
  if (!group.store(scales)) return false;
  const __m512 step = _mm512_set1_ps(group.step), bias = _mm512_set1_ps(group.bias);
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i)
    store_quotients<kBits>(_mm512_sub_ps(x[i], bias), step, _mm512_setzero_ps(), _mm512_set1_ps(kMost),
                           codes + 16 * i * kBits / 8);
  return true;
}

}  // namespace
}  // namespace octavo
