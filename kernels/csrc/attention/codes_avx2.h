// Scales of codes, and tables of their integers.
#pragma once

#include <immintrin.h>

#include "attention/code_values.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kChunk = 64;  // dims that are converted together: 32 bytes of codes

OCTAVO_INLINE __m256i load256(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
OCTAVO_INLINE void store256(void* to, __m256i value) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), value);
}

// Loads 16 halves as floats; 0 where the mask has a 0.
OCTAVO_INLINE void load_halves(const uint8_t* from, uint32_t mask, float (&to)[16]) {
  for (int i = 0; i < 16; i += 8)
    _mm256_storeu_ps(to + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i))));
  if (mask == 0xffff) return;
  for (int i = 0; i < 16; ++i) to[i] = mask >> i & 1 ? to[i] : 0.0f;
}

// Loads the scales of 16 rows; 0 where the mask has a 0. A row of planes begins with its scale, an E5M3 byte.
template <class Code>
OCTAVO_INLINE void load_scales(const uint8_t* from, int64_t stride, uint32_t mask, float (&to)[16]) {
  if constexpr (!Code::kPlanes) return load_halves(from, mask, to);
  uint16_t halves[16];
  for (int i = 0; i < 16; ++i) halves[i] = uint16_t(from[i * stride] << 7);
  load_halves(reinterpret_cast<const uint8_t*>(halves), mask, to);
}

// Returns the side that `of` makes for the class of these codes; null for codes without a class.
template <class Side, class Of>
const Side* side_of(CodeType codes, Of of) {
  switch (codes) {
    case CodeType::fp4: return of(Fp4{});
    case CodeType::fp5: return of(Fp5{});
    case CodeType::int4: return of(Int4{});
    default: return nullptr;
  }
}

// Table for VPSHUFB: kOf(code) for each of 16 codes, in both 128-bit halves; made at compile time.
template <auto kOf>
OCTAVO_INLINE __m256i byte_table() {
  struct Bytes {
    alignas(16) int8_t all[16];
    constexpr Bytes() : all() {
      for (int code = 0; code < 16; ++code) all[code] = int8_t(kOf(code));
    }
  };
  static constexpr Bytes kBytes;
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kBytes.all)));
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
