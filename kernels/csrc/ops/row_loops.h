// Parts of row operations, for sources that are compiled for each instruction set.
#pragma once

#include "runtime/numeric.h"
#include "runtime/round_floats.h"

namespace octavo {
namespace {

constexpr int kLanes = 16;   // partial sums of a reduction; fixed, so that all instruction sets round alike
constexpr int kBlock = 256;  // values converted at once, on the stack
constexpr std::size_t kItemBytes = 32 << 10;  // bytes of one operand that justify waking a thread

// Adds term(value) of `count` values to the lanes; blocks begin at a multiple of kLanes.
template <class Term>
inline void add_terms(const float* values, int count, float* lanes, Term term) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += term(values[i + lane]);
  for (int lane = 0; i + lane < count; ++lane) lanes[lane] += term(values[i + lane]);
}

// Repeatedly adds the upper half of the lanes to the lower half, until one value is left.
inline float add_lanes(float* lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(_mm512_loadu_ps(lanes));  // adds lanes in the same order
#else
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
#endif
}

// Returns the sum of term(value) over elements [start, start + size).
template <class Term>
inline float sum_row(const void* x, Float type, std::size_t start, int size, Term term) {
  float lanes[kLanes] = {}, values[kBlock];
  for (int at = 0; at < size; at += kBlock) {
    const int count = size - at < kBlock ? size - at : kBlock;
    load_floats(x, type, start + at, count, values);
    add_terms(values, count, lanes, term);
  }
  return add_lanes(lanes);
}

inline float rms_factor(const void* x, Float type, std::size_t start, int size, float eps) {
  const float total = sum_row(x, type, start, size, [](float value) { return value * value; });
  return 1.0f / __builtin_sqrtf(total / static_cast<float>(size) + eps);
}

// Computes values [count] = x * factor * weight from elements `start` of x and `at` of the weight onwards.
inline void scale_block(const void* x, Float type, std::size_t start, const void* weight, Float weight_type,
                        int at, int count, float factor, float* values) {
  load_floats(x, type, start + at, count, values);
  for (int i = 0; i < count; ++i) values[i] *= factor;
  if (weight == nullptr) return;
  float weights[kBlock];
  load_floats(weight, weight_type, at, count, weights);
  for (int i = 0; i < count; ++i) values[i] *= weights[i];
}

}  // namespace
}  // namespace octavo
