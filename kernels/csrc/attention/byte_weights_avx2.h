// Softmax weights as 8-bit fixed point, for products of bytes summed in 16-bit lanes.
//
// Rounding preserves the total weight: each of a vector's eight lanes passes its rounding error on to the
// same lane of the next vector. The largest weight becomes at most 254. The weights of a stretch are limited
// so that their sum times the codes' largest integer fits into 16 bits.
#pragma once

#include <algorithm>

#include "attention/byte_rows_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr float kLargestWeight = 254;  // at most 255 with the rounding error that is passed on

// Returns the limit of a stretch's sum of weights; each lane may round up by half a unit, hence the margin.
template <class Code>
constexpr float kLargestSum = float(INT16_MAX / Code::kLargestValue - 4);

// Converts a stretch's weights * scales to bytes; returns the factor that turns sums of products into floats.
template <class Code>
OCTAVO_INLINE float fix_weights(const float* weights, const float* scales, uint32_t* pairs) {
  __m256 scaled[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    scaled[i] = _mm256_mul_ps(_mm256_loadu_ps(weights + 8 * i), _mm256_loadu_ps(scales + 8 * i));
  const float top = octavo::largest_lane(
      (Vec)_mm256_max_ps(_mm256_max_ps(scaled[0], scaled[1]), _mm256_max_ps(scaled[2], scaled[3])));
  const float sum = octavo::sum_lanes(
      (Vec)_mm256_add_ps(_mm256_add_ps(scaled[0], scaled[1]), _mm256_add_ps(scaled[2], scaled[3])));
  const float unit = std::max(top * (1 / kLargestWeight), sum * (1 / kLargestSum<Code>));
  const __m256 to_fixed = _mm256_set1_ps(unit > 1e-33f ? 1 / unit : 0.0f);
  __m256 running = _mm256_setzero_ps();
  __m256i before = _mm256_setzero_si256(), fixed[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    running = _mm256_add_ps(running, _mm256_mul_ps(scaled[i], to_fixed));
    const __m256i rounded = _mm256_cvtps_epi32(running);
    fixed[i] = _mm256_sub_epi32(rounded, before);
    before = rounded;
  }
  const __m256i words[2] = {_mm256_packs_epi32(fixed[0], fixed[1]), _mm256_packs_epi32(fixed[2], fixed[3])};
  // Reorders groups of four positions, which are in the order 0 2 4 6 1 3 5 7 after packing within 128 bits.
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words[0], words[1]),
                                                    _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  const __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(bytes));
  const __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(bytes, 1));
  store256(pairs, _mm256_or_si256(low, _mm256_slli_epi32(low, 16)));
  store256(pairs + 8, _mm256_or_si256(high, _mm256_slli_epi32(high, 16)));
  return unit * (1.0f / Code::kScale);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
