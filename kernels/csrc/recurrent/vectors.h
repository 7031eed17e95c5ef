// Vector arithmetic for recurrences. Multiply-adds are fused only in explicit calls of fma(), so every loop
// rounds a token's operations in the same way. Internal linkage: see numeric.h.
#pragma once

#include "runtime/numeric.h"
#include "runtime/vectors.h"

namespace octavo {
namespace {

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
#if defined(__AVX__)

typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));

// Adds neighbouring lanes in each half: four sums from a, then four from b.
inline Eight neighbours(Eight a, Eight b) {
  return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
         __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}

inline Eight folded(Vec x) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
         __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  return x;
#endif
}

// Returns the sums of the lanes of four vectors, all added in the same order.
inline Four sums(Vec a, Vec b, Vec c, Vec d) {
  const Eight all = neighbours(neighbours(folded(a), folded(b)), neighbours(folded(c), folded(d)));
  return __builtin_shufflevector(all, all, 0, 1, 2, 3) + __builtin_shufflevector(all, all, 4, 5, 6, 7);
}

#else

inline Four sums(Vec a, Vec b, Vec c, Vec d) {
  const auto sum = [](Vec x) { return (x[0] + x[1]) + (x[2] + x[3]); };
  return Four{sum(a), sum(b), sum(c), sum(d)};
}

#endif

inline float sum(Vec x) { return sums(x, Vec{}, Vec{}, Vec{})[0]; }

inline Vec sigmoid_lanes(Vec x) { return 1.0f / (1.0f + exp_lanes(-x)); }

// Returns log(1 + e^x) = max(x, 0) + log1p(y), where y = e^-|x| and log1p(y) = 2 atanh(y / (2 + y)). The
// argument of atanh is at most 1/3, and its series is cut where terms are below 2e-8.
inline Vec softplus_lanes(Vec x) {
  const Vec size = x < 0.0f ? -x : x;
  const Vec y = exp_lanes(-size), s = y / (y + 2.0f), z = s * s;
  Vec p = splat(1.0f / 13.0f);
  p = fma(p, z, splat(1.0f / 11.0f));
  p = fma(p, z, splat(1.0f / 9.0f));
  p = fma(p, z, splat(1.0f / 7.0f));
  p = fma(p, z, splat(1.0f / 5.0f));
  p = fma(p, z, splat(1.0f / 3.0f));
  p = fma(p, z, splat(1.0f));
  return fma(s + s, p, x > 0.0f ? x : Vec{});
}

// Applies function(vector) to `values` [count] in place; there must be space for whole vectors.
template <class Function>
inline void map_lanes(float* values, int count, Function function) {
  for (int i = 0; i < count; i += kLanes) store(values + i, function(load(values + i)));
}

constexpr int whole_vectors(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

}  // namespace
}  // namespace octavo
