// Values and scales of codes: 4 bits (fp4, int4), or 4 bits and a bit plane of the lowest bits (fp5).
#pragma once

#include <immintrin.h>

#include <cstring>

#include "attention/sides.h"
#include "pages/codes.h"

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

// A value times kScale is an integer up to kLargestValue, plus added(code) if its bit in the plane is set.
struct Nibble {
  static constexpr bool kPlanes = false;
  static constexpr int added(int) { return 0; }
  static uint64_t plane(const uint8_t*, int) { return 0; }
  OCTAVO_INLINE void load_scales(const uint8_t* from, int64_t, uint32_t mask, float (&to)[16]) {
    load_halves(from, mask, to);
  }
};
struct Fp4 : Nibble {
  static constexpr int kScale = 2, kLargestValue = 12;
  static constexpr int value(int code) { return int(kScale * kE2M1[code]); }
};
struct Int4 : Nibble {
  static constexpr int kScale = 1, kLargestValue = 8;
  static constexpr int value(int code) { return (code ^ 8) - 8; }
};
struct Fp5 {
  static constexpr bool kPlanes = true;
  static constexpr int kScale = 4, kLargestValue = 28;
  static constexpr int value(int code) { return int(kScale * kE2M1[code]); }
  // Half of the distance to the next E2M1 value, in quarters: 1 for exponents 0 and 1, then 2 and 4.
  static constexpr int added(int code) {
    const int exponent = code >> 1 & 3, half = exponent < 2 ? 1 : 1 << (exponent - 1);
    return code & 8 ? -half : half;
  }

  // Returns the lowest bits of dims [dim, dim + 64) of a row.
  OCTAVO_INLINE uint64_t plane(const uint8_t* planes, int dim) {
    uint64_t bits;
    std::memcpy(&bits, planes + dim / 8, 8);
    return dim == 0 ? bits & ~uint64_t(0xff) : bits;  // byte 0 is the scale, not bits
  }
  OCTAVO_INLINE void load_scales(const uint8_t* planes, int64_t stride, uint32_t mask, float (&to)[16]) {
    uint16_t halves[16];
    for (int i = 0; i < 16; ++i) halves[i] = uint16_t(planes[i * stride] << 7);
    load_halves(reinterpret_cast<const uint8_t*>(halves), mask, to);
  }
};
static_assert(kFp5Coarse == 8);

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
