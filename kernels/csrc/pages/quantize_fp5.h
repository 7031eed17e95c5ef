// Conversion of rows to fp5, with the same operations as octavo.kernels.formats.fp5. Internal linkage.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "pages/codes.h"
#include "pages/quantize_row.h"

namespace octavo {
namespace {

// Candidate scales in the order of trial, as numbers of E5M3 steps above the scale nearest to absmax / 7.
constexpr int kScaleSteps[] = {0, 1, 2, 3, 6};
constexpr int kLargestE5m3 = 247;

// Returns the integer nearest to a value of at most 2^22, ties to even; adding 2^23 rounds the fraction away.
inline float nearest_integer(float value) { return (value + 0x1p23f) - 0x1p23f; }

// Returns the E2M2 magnitude (E2M1 if kCoarse) nearest to magnitude / scale, ties to the even index. Rounding
// the quotient does not move it across an edge, because edges have few bits.
template <bool kCoarse>
inline float nearest_e2m2(float magnitude, float scale) {
  const float quotient = std::min(magnitude / scale, 8.0f);
  const float step = (quotient < 2 ? 0.25f : quotient < 4 ? 0.5f : 1.0f) * (kCoarse ? 2 : 1);
  const float per_step = (quotient < 2 ? 4.0f : quotient < 4 ? 2.0f : 1.0f) * (kCoarse ? 0.5f : 1.0f);
  return std::min(nearest_integer(quotient * per_step) * step, kCoarse ? 6.0f : 7.0f);
}

inline int e2m2_index(float value) {
  return int(value < 2 ? value * 4 : value < 4 ? value * 2 + 4 : value + 8);
}

template <bool kCoarse>
inline void squared_errors(const float* magnitudes, int first, int end, float scale, float* errors) {
  for (int i = first; i < end; ++i) {
    const float difference = magnitudes[i] - scale * nearest_e2m2<kCoarse>(magnitudes[i], scale);
    errors[i] = difference * difference;
  }
}

// Returns the E5M3 scale that gives the smallest squared error; 0 if absmax / 7 is 0 as fp16.
inline uint8_t best_e5m3(const float* magnitudes, int dim, float absmax) {
  alignas(64) float errors[kMaxDim];
  const int width = padded_width(dim);
  const uint16_t half = float_to_f16(std::min(absmax * (1.0f / 7), e5m3(kLargestE5m3)));
  if (half == 0) return 0;
  uint8_t best = 0;
  float best_error = 0;
  for (const int step : kScaleSteps) {
    const uint8_t byte = uint8_t(std::min(std::max(half >> 7, 1) + step, kLargestE5m3));
    squared_errors<true>(magnitudes, 0, kFp5Coarse, e5m3(byte), errors);
    squared_errors<false>(magnitudes, kFp5Coarse, dim, e5m3(byte), errors);
    std::fill(errors + dim, errors + width, 0.0f);
    const float error = halving_sum(errors, width);
    if (best != 0 && !(error < best_error)) continue;
    best = byte;
    best_error = error;
  }
  return best;
}

inline bool store_fp5(const float* row, int dim, uint8_t* codes, uint8_t* planes) {
  alignas(64) float magnitudes[kMaxDim];
  const Extent extent = load_magnitudes(row, dim, magnitudes);
  if (!extent.finite) return false;
  const uint8_t byte = best_e5m3(magnitudes, dim, extent.largest);
  std::memset(planes, 0, size_t(dim) / 8);
  std::memset(codes, 0, size_t(dim) / 2);
  planes[0] = byte;
  if (byte == 0) return true;
  const float scale = e5m3(byte);
  for (int i = 0; i < dim; ++i) {
    const bool coarse = i < kFp5Coarse;
    const int index = e2m2_index(coarse ? nearest_e2m2<true>(magnitudes[i], scale)
                                        : nearest_e2m2<false>(magnitudes[i], scale));
    codes[i / 2] |= uint8_t((index >> 1 | (std::signbit(row[i]) ? 8 : 0)) << i % 2 * 4);
    if (!coarse) planes[i / 8] |= uint8_t((index & 1) << i % 8);
  }
  return true;
}

}  // namespace
}  // namespace octavo
