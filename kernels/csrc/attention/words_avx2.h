// Codes as 16-bit lanes: a byte shuffle looks up each byte's code, and the upper byte of a lane always code
// 0.
//
// They are looked up as value + kLargestValue, which makes bytes unsigned, in both bytes of a lane:
// value + 257 * kLargestValue. Sums wrap modulo 2^32 and the offset's share, kWordOffset times the sum of
// the factors, is subtracted at the end.
#pragma once

#include "attention/codes_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kLargestFixed = 32767;  // of the fixed point of queries and weights
constexpr int kDirectRows = 2;        // up to so many rows expand codes themselves; more share a panel

template <class Code>
constexpr uint32_t kWordOffset = 257 * Code::kLargestValue;

// Of the chunk at `dim` of a row: bits 4 to 7 of lane i are those of dims 4 i to 4 i + 3.
template <class Code>
OCTAVO_INLINE __m256i low_bits(const uint8_t* planes, int dim) {
  if constexpr (!Code::kPlanes) return _mm256_setzero_si256();
  const __m128i bytes = _mm_cvtsi64_si128(int64_t(Code::plane(planes, dim)));
  return _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(_mm_slli_epi16(bytes, 4), bytes));
}

template <class Code>
struct WordLookup {
  __m256i table = byte_table<[](int code) { return Code::value(code) + Code::kLargestValue; }>();
  __m256i addends = byte_table<[](int code) { return Code::added(code); }>();

  // Four vectors of lanes value + 257 * kLargestValue: lane i of vector j is dim 4 i + j of the chunk.
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
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
