// Scales of rows, and sums in the order that formats define. Internal linkage.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention/rows.h"
#include "pages/codes.h"

namespace octavo {
namespace {

constexpr float kMaxHalf = 65504.0f;  // largest finite fp16; scales are clamped to it
constexpr int kCandidates = 5;        // candidate scales of a row; of equal errors, the first wins

inline void store_half(uint8_t* to, uint16_t bits) { std::memcpy(to, &bits, 2); }

// Rows of fp4: E2M1 codes and an fp16 scale.
struct Fp4Row {
  using Scale = uint16_t;
  static constexpr bool kPlanes = false;
  static Scale candidate(float largest, int c) {
    constexpr float kFactors[kCandidates] = {float(1.0 / 6), float(0.94 / 6), float(0.88 / 6),
                                             float(1.08 / 6), float(1.36 / 6)};
    return float_to_f16(std::min(largest * kFactors[c], kMaxHalf));
  }
  static float value(Scale scale) { return f16_to_float(scale); }
};

// Rows of fp5: E2M2 codes, whose lowest bits are in planes, and an E5M3 scale in the place of the planes'
// first byte. Candidates are some steps above the scale nearest to a seventh of the largest magnitude.
struct Fp5Row {
  using Scale = uint8_t;
  static constexpr bool kPlanes = true;
  static Scale candidate(float largest, int c) {
    constexpr int kLargest = 247, kSteps[kCandidates] = {0, 1, 2, 3, 6};
    const uint16_t half = float_to_f16(std::min(largest * (1.0f / 7), e5m3(kLargest)));
    return half == 0 ? 0 : uint8_t(std::min(std::max(half >> 7, 1) + kSteps[c], kLargest));
  }
  static float value(Scale scale) { return e5m3(scale); }
};

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

}  // namespace
}  // namespace octavo
