// GCC vectors of floats, for every instruction set, and their exponential.
#pragma once

#include <cstdint>
#include <cstring>

namespace octavo {
namespace {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t UintVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline Vec load(const float* from) { return *reinterpret_cast<const Vec*>(from); }
inline void store(float* to, Vec value) { *reinterpret_cast<Vec*>(to) = value; }

// Exchanges lanes that are h apart. Adding the result for h = 1, 2, 4, ... gives every lane the sum of all.
inline Vec exchange(Vec x, int h) {
#if defined(__clang__)  // Clang has only shuffles by constants
  Vec exchanged{};
  for (int i = 0; i < kLanes; ++i) exchanged[i] = x[i ^ h];
  return exchanged;
#else
  IntVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return __builtin_shuffle(x, lane ^ h);
#endif
}

inline Vec largest_of(Vec a, Vec b) { return a > b ? a : b; }

inline float largest_lane(Vec x) {
#pragma GCC unroll 4
  for (int h = kLanes / 2; h > 0; h /= 2) x = largest_of(x, exchange(x, h));
  return x[0];
}

inline float sum_lanes(Vec x) {
#pragma GCC unroll 4
  for (int h = kLanes / 2; h > 0; h /= 2) x += exchange(x, h);
  return x[0];
}

inline constexpr float kLog2E = 1.44269504088896341f;

// Returns 2^x with a relative error of 2e-7 for -126 <= x <= 127; smaller x give 2^-126, about 1e-38.
inline Vec exp2(Vec x) {
  x = x < -126.0f ? Vec{} - 126.0f : x;
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  const Vec shifted = x + 12582912.0f;
  const Vec fraction = x - (shifted - 12582912.0f);
  // 2^f on [-0.5, 0.5] by Taylor coefficients ln(2)^n / n!; the omitted sixth term bounds the error.
  Vec power = fraction * 1.5403530e-4f + 1.3333558e-3f;
  power = power * fraction + 9.6181291e-3f;
  power = power * fraction + 5.5504109e-2f;
  power = power * fraction + 2.4022651e-1f;
  power = power * fraction + 6.9314718e-1f;
  power = power * fraction + 1.0f;
  return (Vec)((UintVec)power + ((UintVec)shifted << 23));  // unsigned: a NaN's bits may wrap
}

// Returns cap * tanh(x / cap) * log2(e) for a logit x, that is, the capped logit in the log2 domain.
inline Vec soft_cap(Vec x, float cap) {
  Vec exponent = x * (2 * kLog2E / cap);
  exponent = exponent > 64.0f ? Vec{} + 64.0f : exponent;  // tanh(x) rounds to 1 long before that
  const Vec doubled = exp2(exponent);
  return (1.0f - 2.0f / (doubled + 1.0f)) * (cap * kLog2E);
}

inline float scalar_exp2(float x) { return exp2(Vec{} + x)[0]; }

}  // namespace
}  // namespace octavo
