// Common parts of the formats for storing a row. Internal linkage.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention/rows.h"

namespace octavo {
namespace {

constexpr float kMaxHalf = 65504.0f;  // largest finite fp16; scales are clamped to it

// fp4's candidate scales are absmax times these factors, tried in this order (octavo.kernels.formats.fp4).
constexpr float kScaleFactors[] = {float(1.0 / 6), float(0.94 / 6), float(0.88 / 6), float(1.08 / 6),
                                   float(1.36 / 6)};

inline void store_half(uint8_t* to, uint16_t bits) { std::memcpy(to, &bits, 2); }
inline bool finite_half(uint16_t bits) { return (bits & 0x7c00) != 0x7c00; }

// Largest magnitude of some values, and whether all are finite.
struct Extent {
  float largest;
  bool finite;
};

// Writes the magnitudes of `count` values and returns their extent.
inline Extent load_magnitudes(const float* values, int count, float* magnitudes) {
  constexpr float kLargest = 3.402823466e38f;
  Vec top{};
  IntVec finite = IntVec{} - 1;
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec magnitude = (Vec)((IntVec)load(values + i) & INT32_MAX);
    finite &= magnitude <= kLargest;
    top = largest_of(magnitude, top);
    store(magnitudes + i, magnitude);
  }
  Extent extent{largest_lane(top), true};
  for (; i < count; ++i) {
    magnitudes[i] = std::fabs(values[i]);
    extent.finite &= magnitudes[i] <= kLargest;
    extent.largest = std::max(extent.largest, magnitudes[i]);
  }
  for (int lane = 0; lane < kLanes; ++lane) extent.finite &= finite[lane] != 0;
  return extent;
}

// Returns the smallest power of two that is at least `dim`.
inline int padded_width(int dim) {
  int width = 1;
  while (width < dim) width *= 2;
  return width;
}

// Returns the sum of `width` values, a power of two, in the order that formats define: the upper half is
// repeatedly added to the lower, until one value is left.
inline float halving_sum(float* values, int width) {
  while (width > 1) {
    width /= 2;
    for (int i = 0; i < width; ++i) values[i] += values[i + width];
  }
  return values[0];
}

// ---- int8 and int4 ----

constexpr float lowest_integer(int bits) { return bits == 8 ? -127.0f : -8.0f; }
constexpr float highest_integer(int bits) { return bits == 8 ? 127.0f : 7.0f; }

// Stores and returns the scale of a row of integer codes, given its largest magnitude. If the scale rounds to
// 0, it also stores codes of zero.
inline float store_integer_scale(float absmax, int bits, int dim, uint8_t* codes, uint8_t* scale) {
  const float factor = bits == 8 ? 1.0f / 127 : 1.0f / 7;
  const uint16_t half = float_to_f16(std::min(absmax * factor, kMaxHalf));
  store_half(scale, half);
  if (half == 0) std::memset(codes, 0, size_t(dim) * bits / 8);
  return half == 0 ? 0.0f : f16_to_float(half);
}

// ---- scales of groups ----

inline uint8_t to_e8m0(float absmax) {
  return uint8_t(std::clamp(int((as_bits(absmax) + 0x3fffff) >> 23) - 2, 0, 252));
}

inline uint8_t to_e4m3(float absmax) {
  const float quotient = absmax / 6.0f;
  const uint32_t bits = as_bits(quotient);
  if (quotient < 0x1p-6f) return uint8_t(std::nearbyintf(quotient * 512.0f));
  return uint8_t(std::min(int((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - 960, 126));
}

// Step and bias of a group of affine codes from 0 to `most`, before rounding to fp16.
struct AffineGroup {
  float step, bias;

  AffineGroup(float low, float high, float most) {
    const float size = std::max((high - low) / most, 1e-7f);
    const bool from_low = std::fabs(low) > std::fabs(high);
    const float edge = from_low ? low : high;
    step = from_low ? size : -size;
    const float count = std::nearbyintf(edge / step);
    bias = count != 0 ? edge : 0.0f;
    if (count != 0) step = edge / count;
  }

  // Stores both as fp16; returns false if they do not fit.
  bool store(uint8_t* to) const {
    const uint16_t stored_step = float_to_f16(step), stored_bias = float_to_f16(bias);
    store_half(to, stored_step);
    store_half(to + 2, stored_bias);
    return finite_half(stored_step) && finite_half(stored_bias);
  }
};

}  // namespace
}  // namespace octavo
