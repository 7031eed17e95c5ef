// Rows to bf16, fp16, int8, int4, mxfp4, nvfp4, affine8 and affine4 on AVX2: the operations of
// pages/quantize.h, 16 values at a time, under the names that AVX-512's have. Internal linkage.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "pages/codes.h"
#include "pages/quantize_row.h"

namespace octavo {
namespace {

inline __attribute__((always_inline)) __m256 magnitudes_of(__m256 x) {
  return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}

inline float largest_of_lanes(__m256 x) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// Whether all values are finite, and their largest magnitude; dim: a multiple of 8.
struct Extent {
  bool finite;
  float largest;

  Extent(const float* row, int dim) {
    const __m256 limit = _mm256_set1_ps(3.402823466e38f);
    __m256 top = _mm256_setzero_ps(), all = _mm256_cmp_ps(top, top, _CMP_EQ_OQ);
    for (int i = 0; i < dim; i += 8) {
      const __m256 magnitude = magnitudes_of(_mm256_loadu_ps(row + i));
      all = _mm256_and_ps(all, _mm256_cmp_ps(magnitude, limit, _CMP_LE_OQ));
      top = _mm256_max_ps(magnitude, top);
    }
    finite = _mm256_movemask_ps(all) == 0xff;
    largest = largest_of_lanes(top);
  }
};

// float_to_bf16 of finite values; false if one is not finite, or rounds beyond the range; dim: a multiple
// of 16.
inline bool store_bf16_vectors(const float* row, int dim, uint8_t* codes) {
  const __m256i one = _mm256_set1_epi32(1), below_half = _mm256_set1_epi32(0x7fff);
  const Extent extent(row, dim);
  for (int i = 0; i < dim; i += 16) {
    __m256i words[2];
    for (int half = 0; half < 2; ++half) {
      const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(row + i + 8 * half));
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
      const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(below_half, odd));
      words[half] = _mm256_srli_epi32(rounded, 16);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + 2 * i),
                        _mm256_permute4x64_epi64(_mm256_packus_epi32(words[0], words[1]), 0xd8));
  }
  return extent.finite && extent.largest <= 0x1.fefffep127f;  // what is larger becomes infinity
}

// float_to_f16 likewise.
inline bool store_fp16_vectors(const float* row, int dim, uint8_t* codes) {
  const Extent extent(row, dim);
  for (int i = 0; i < dim; i += 8)
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(codes + 2 * i),
        _mm256_cvtps_ph(_mm256_loadu_ps(row + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  return extent.finite && extent.largest <= 0x1.ffdffep15f;  // what is larger becomes infinity
}

// Codes of kBits of 16 integers that fit them.
template <int kBits, bool kSigned>
inline __attribute__((always_inline)) void store_codes(__m256i first, __m256i second, uint8_t* codes) {
  // By turns four of each.
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
  const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
  if constexpr (kBits == 8) {
    const __m128i bytes = kSigned ? _mm_packs_epi16(low, high) : _mm_packus_epi16(low, high);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), bytes);
  } else {
    const __m128i nibbles = _mm_and_si128(_mm_packs_epi16(low, high), _mm_set1_epi8(15));
    const __m128i pairs = _mm_maddubs_epi16(nibbles, _mm_set1_epi16(0x1001));  // lower + 16 upper
    _mm_storel_epi64(reinterpret_cast<__m128i*>(codes), _mm_packus_epi16(pairs, pairs));
  }
}

// The integers nearest to values / step, ties to even, between two limits. Limits are integers, so that it
// does not matter which comes first, and what is too large for an integer never is one.
inline __attribute__((always_inline)) __m256i quotients(__m256 values, __m256 step, __m256 lowest,
                                                        __m256 highest) {
  const __m256 quotient = _mm256_div_ps(values, step);
  return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(quotient, lowest), highest));
}

// dim: a multiple of 16
template <int kBits>
inline bool store_integers_of(const float* row, int dim, uint8_t* codes, uint8_t* scale) {
  const Extent extent(row, dim);
  if (!extent.finite) return false;
  const float stored = store_integer_scale(extent.largest, kBits, dim, codes, scale);
  if (stored == 0) return true;
  const __m256 step = _mm256_set1_ps(stored);
  const __m256 lowest = _mm256_set1_ps(lowest_integer(kBits));
  const __m256 highest = _mm256_set1_ps(highest_integer(kBits));
  for (int i = 0; i < dim; i += 16)
    store_codes<kBits, true>(quotients(_mm256_loadu_ps(row + i), step, lowest, highest),
                             quotients(_mm256_loadu_ps(row + i + 8), step, lowest, highest),
                             codes + i * kBits / 8);
  return true;
}

// The edges between neighbours of E2M1's magnitudes, times a scale, and codes by counting those below.
struct E2m1Edges {
  __m256 quarter, three_quarters, five_quarters, seven_quarters, five_halves, seven_halves, five;

  explicit E2m1Edges(float scale)
      : quarter(_mm256_set1_ps(scale * 0.25f)),
        three_quarters(_mm256_set1_ps(scale * 0.75f)),
        five_quarters(_mm256_set1_ps(scale * 1.25f)),
        seven_quarters(_mm256_set1_ps(scale * 1.75f)),
        five_halves(_mm256_set1_ps(scale * 2.5f)),
        seven_halves(_mm256_set1_ps(scale * 3.5f)),
        five(_mm256_set1_ps(scale * 5.0f)) {}

  __attribute__((always_inline)) __m256i codes(__m256 x) const {
    const __m256 magnitude = magnitudes_of(x);
    __m256i code = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(x), 28), _mm256_set1_epi32(8));
    code = count<_CMP_GT_OQ>(code, magnitude, quarter);
    code = count<_CMP_GE_OQ>(code, magnitude, three_quarters);
    code = count<_CMP_GT_OQ>(code, magnitude, five_quarters);
    code = count<_CMP_GE_OQ>(code, magnitude, seven_quarters);
    code = count<_CMP_GT_OQ>(code, magnitude, five_halves);
    code = count<_CMP_GE_OQ>(code, magnitude, seven_halves);
    return count<_CMP_GT_OQ>(code, magnitude, five);
  }

 private:
  template <int kBeyond>
  static inline __attribute__((always_inline)) __m256i count(__m256i code, __m256 magnitude, __m256 edge) {
    return _mm256_sub_epi32(code, _mm256_castps_si256(_mm256_cmp_ps(magnitude, edge, kBeyond)));
  }
};

// Groups of 16 kVectors values of E2M1 codes; `to_scale` makes a group's byte, `of_scale` a float of it.
template <int kVectors, class ToScale, class OfScale>
inline bool store_e2m1_groups(const float* row, int dim, uint8_t* codes, uint8_t* scales, ToScale to_scale,
                              OfScale of_scale) {
  constexpr int kGroup = 16 * kVectors;
  if (!Extent(row, dim).finite) return false;
  for (int at = 0; at < dim; at += kGroup, row += kGroup, codes += kGroup / 2, ++scales) {
    *scales = to_scale(Extent(row, kGroup).largest);
    const float scale = of_scale(*scales);
    if (scale == 0) {
      std::memset(codes, 0, kGroup / 2);
      continue;
    }
    const E2m1Edges edges(scale);
    for (int i = 0; i < kGroup; i += 16)
      store_codes<4, false>(edges.codes(_mm256_loadu_ps(row + i)), edges.codes(_mm256_loadu_ps(row + i + 8)),
                            codes + i / 2);
  }
  return true;
}

// Codes are made with the step and bias before these round to fp16. Which zero the lowest and the highest of
// a group are, if they are zeros, makes no difference: a bias is then 0.
template <int kBits>
inline bool store_affine_group_of(const float* row, uint8_t* codes, uint8_t* scales) {
  constexpr float kMost = kBits == 8 ? 255.0f : 15.0f;
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 lows = _mm256_loadu_ps(row), highs = lows;
  for (int i = 8; i < kAffineGroup; i += 8) {
    const __m256 x = _mm256_loadu_ps(row + i);
    lows = _mm256_min_ps(lows, x);
    highs = _mm256_max_ps(highs, x);
  }
  const float low = -largest_of_lanes(_mm256_xor_ps(lows, sign));
  const AffineGroup group(low, largest_of_lanes(highs), kMost);
  if (!group.store(scales)) return false;
  const __m256 step = _mm256_set1_ps(group.step), bias = _mm256_set1_ps(group.bias);
  const __m256 lowest = _mm256_setzero_ps(), highest = _mm256_set1_ps(kMost);
  for (int i = 0; i < kAffineGroup; i += 16) {
    const __m256 first = _mm256_sub_ps(_mm256_loadu_ps(row + i), bias);
    const __m256 second = _mm256_sub_ps(_mm256_loadu_ps(row + i + 8), bias);
    store_codes<kBits, false>(quotients(first, step, lowest, highest),
                              quotients(second, step, lowest, highest), codes + i * kBits / 8);
  }
  return true;
}

}  // namespace
}  // namespace octavo
