// fp4 pages by integer dot products (VNNI). E2M1 values are halves of the integers 0, 1, 2, 3, 4, 6, 8,
// 12, so products with integer queries and weights are exact, and a row's fp16 scale is applied to
// its scores, or to its weights, as one float factor.
//
// Queries and softmax weights become 16-bit fixed point in two bytes, each byte a row of its own for
// vpdpbusd: their rounding, 2^-16 of the largest element, is far below bf16's.
#pragma once

#include <cstring>

#include "attention_avx512.h"
#include "page_codes.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kOffset = 12;  // makes K codes unsigned; its share of a product is subtracted at the end

OCTAVO_INLINE __m512i table(int offset) {
  alignas(16) int8_t bytes[16];
  for (int code = 0; code < 16; ++code) bytes[code] = int8_t(2 * kE2M1[code] + offset);
  return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}

OCTAVO_INLINE __m512i low_nibbles(__m512i codes) { return _mm512_and_si512(codes, _mm512_set1_epi8(15)); }
OCTAVO_INLINE __m512i high_nibbles(__m512i codes) { return low_nibbles(_mm512_srli_epi16(codes, 4)); }

OCTAVO_INLINE __m512i broadcast4(const void* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return _mm512_set1_epi32(four);
}

OCTAVO_INLINE __m512 halves(const uint8_t* from, __mmask16 mask) {
  return _mm512_maskz_cvtph_ps(mask, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// 256 * high + low of two rows of products
OCTAVO_INLINE __m512i join(__m512i high, __m512i low) {
  return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
