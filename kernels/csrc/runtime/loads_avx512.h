// Loads of float32 vectors from any float type, and conversion to bf16, on AVX-512. Internal linkage: see
// numeric.h.
#pragma once

#include <immintrin.h>

#include "runtime/numeric.h"

namespace octavo {
namespace {

inline __m512 load_bf16(const void* p) {
  const __m256i half = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Loads values [at, at + 16) of an array of `type`.
inline __m512 load16(const void* p, Float type, std::size_t at) {
  const uint8_t* from = static_cast<const uint8_t*>(p) + at * float_size(type);
  if (type == Float::bf16) return load_bf16(from);
  if (type == Float::f32) return _mm512_loadu_ps(from);
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Converts 32 floats to bf16.
inline __m512i as_bf16(__m512 low, __m512 high) {
  if (!has_subnormal(low) && !has_subnormal(high)) return (__m512i)_mm512_cvtne2ps_pbh(high, low);
  float values[32];
  bf16_t rounded[32];
  _mm512_storeu_ps(values, low);
  _mm512_storeu_ps(values + 16, high);
  for (int i = 0; i < 32; ++i) rounded[i] = float_to_bf16(values[i]);
  return _mm512_loadu_si512(rounded);
}

}  // namespace
}  // namespace octavo
