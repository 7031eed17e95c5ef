// Codes of 4 bits, and of 4 bits and a plane of lowest bits, as 16-bit lanes: a byte shuffle looks up each
// byte's code, and the upper byte of a lane always code 0.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "attention_sides.h"
#include "page_codes.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kChunk = 64;  // dims that are expanded together: 32 bytes of codes

OCTAVO_INLINE __m256i load256(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
OCTAVO_INLINE void store256(void* to, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(to), value); }

// 16 halves as floats, zeros where the mask has a 0.
OCTAVO_INLINE void load_halves(const uint8_t* from, uint32_t mask, float (&to)[16]) {
  for (int i = 0; i < 16; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i))));
  for (int i = 0; i < 16; ++i) to[i] = mask >> i & 1 ? to[i] : 0.0f;
}

// What a code stands for, times kScale, is an integer; with a lowest bit, `added` to it.
struct Nibble {
  static constexpr bool kPlanes = false;
  static int added(int) { return 0; }
  OCTAVO_INLINE __m256i low_bits(const uint8_t*, int) { return _mm256_setzero_si256(); }
  OCTAVO_INLINE void load_scales(const uint8_t* from, int64_t, uint32_t mask, float (&to)[16]) {
    load_halves(from, mask, to);
  }
};
struct Fp4 : Nibble {
  static constexpr int kScale = 2, kOffset = 12;
  static int value(int code) { return int(kScale * kE2M1[code]); }
};
struct Int4 : Nibble {
  static constexpr int kScale = 1, kOffset = 8;
  static int value(int code) { return (code ^ 8) - 8; }
};
struct Fp5 {
  static constexpr bool kPlanes = true;
  static constexpr int kScale = 4, kOffset = 28;
  static int value(int code) { return int(kScale * kE2M1[code]); }
  static int added(int code) { return int(kScale * e2m2(uint32_t(code), 1)) - value(code); }

  // Of the chunk at `dim` of a row: bits 4 to 7 of lane i are those of dims 4 i to 4 i + 3.
  OCTAVO_INLINE __m256i low_bits(const uint8_t* planes, int dim) {
    uint64_t eight;
    std::memcpy(&eight, planes + dim / 8, 8);
    if (dim == 0) eight &= ~uint64_t(0xff);  // that byte is the scale
    const __m128i bytes = _mm_cvtsi64_si128(int64_t(eight));
    return _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(_mm_slli_epi16(bytes, 4), bytes));
  }
  OCTAVO_INLINE void load_scales(const uint8_t* planes, int64_t stride, uint32_t mask, float (&to)[16]) {
    uint16_t halves[16];
    for (int i = 0; i < 16; ++i) halves[i] = uint16_t(planes[i * stride] << 7);
    load_halves(reinterpret_cast<const uint8_t*>(halves), mask, to);
  }
};
static_assert(kFp5Coarse == 8);

template <class Code>
struct Lookup {
  __m256i table = bytes([](int code) { return Code::value(code) + Code::kOffset; });
  __m256i addends = bytes([](int code) { return Code::added(code); });

  // Four vectors of lanes value + 257 * kOffset: lane i of vector j is dim 4 i + j of the chunk.
  __attribute__((always_inline)) void expand(__m256i codes, __m256i low_bits, __m256i (&to)[4]) const {
    const __m256i nibble = _mm256_set1_epi16(15);
    to[0] = look_up<0>(_mm256_and_si256(codes, nibble), low_bits);
    to[1] = look_up<1>(_mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble), low_bits);
    to[2] = look_up<2>(_mm256_and_si256(_mm256_srli_epi16(codes, 8), nibble), low_bits);
    to[3] = look_up<3>(_mm256_srli_epi16(codes, 12), low_bits);
  }

 private:
  template <int kVector>
  __attribute__((always_inline)) __m256i look_up(__m256i codes, __m256i low_bits) const {
    const __m256i values = _mm256_shuffle_epi8(table, codes);
    if constexpr (!Code::kPlanes) return values;
    // Index 255 looks up 0: where the bit is 0, and in upper bytes.
    const __m256i bit = _mm256_and_si256(low_bits, _mm256_set1_epi16(16 << kVector));
    const __m256i unset = _mm256_cmpeq_epi8(bit, _mm256_setzero_si256());
    return _mm256_add_epi8(values, _mm256_shuffle_epi8(addends, _mm256_or_si256(codes, unset)));
  }

  template <class Of>
  static __m256i bytes(Of of) {
    alignas(16) int8_t all[16];
    for (int code = 0; code < 16; ++code) all[code] = int8_t(of(code));
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(all)));
  }
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
