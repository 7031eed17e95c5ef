// GCC vectors of floats, for every instruction set, and their exponentials.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

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

inline Vec splat(float x) { return Vec{} + x; }

inline float fma(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Returns e^x with a relative error below 2e-7 (Cephes' expf); x is clamped to [-87, 88].
inline Vec exp_lanes(Vec x) {
  x = x > 88.0f ? splat(88.0f) : (x < -87.0f ? splat(-87.0f) : x);
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Vec shifted = fma(x, splat(1.44269504088896341f), magic);
  const Vec n = shifted - magic;
  const Vec r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.0f);
  return p * (Vec)(((UintVec)shifted << 23) + 0x3f800000u);
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
