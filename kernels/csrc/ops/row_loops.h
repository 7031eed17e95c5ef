// Parts of row operations, for sources that are compiled for each instruction set.
#pragma once

#include "runtime/numeric.h"
#include "runtime/round_floats.h"

namespace octavo {
namespace {

constexpr int kSums = 16;    // partial sums of a reduction; fixed, so that all instruction sets round alike
constexpr int kBlock = 256;  // values converted at once, on the stack
constexpr std::size_t kItemBytes = 32 << 10;  // bytes of one operand that justify waking a thread

// Adds term(value) of `count` values to the lanes; blocks begin at a multiple of kSums.
template <class Term>
inline void add_terms(const float* values, int count, float* lanes, Term term) {
  int i = 0;
  for (; i + kSums <= count; i += kSums)
    for (int lane = 0; lane < kSums; ++lane) lanes[lane] += term(values[i + lane]);
  for (int lane = 0; i + lane < count; ++lane) lanes[lane] += term(values[i + lane]);
}

// Repeatedly adds the upper half of the lanes to the lower half, until one value is left.
inline float add_lanes(float* lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(_mm512_loadu_ps(lanes));  // adds lanes in the same order
#else
  for (int half = kSums / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
#endif
}

// Returns the sum of term(value) over elements [start, start + size).
template <class Term>
inline float sum_row(const void* x, Float type, std::size_t start, int size, Term term) {
  float lanes[kSums] = {}, values[kBlock];
  for (int at = 0; at < size; at += kBlock) {
    const int count = size - at < kBlock ? size - at : kBlock;
    load_floats(x, type, start + at, count, values);
    add_terms(values, count, lanes, term);
  }
  return add_lanes(lanes);
}

}  // namespace
}  // namespace octavo
