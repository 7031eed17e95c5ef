// Loads of float32 vectors from any float type on AVX-512. Internal linkage: see numeric.h.
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

}  // namespace
}  // namespace octavo
