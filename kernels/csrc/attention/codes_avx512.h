// Integer dot products (VNNI) for pages of codes. Codes represent small integers, so products with integer
// queries and weights are exact. Scales of K multiply scores, and scales of V multiply weights, as floats.
//
// For int8, queries and softmax weights become 16-bit fixed point in two bytes, and vpdpbusd multiplies each
// byte. Their rounding error, 2^-16 of the largest element, is far below bf16's. For pages of 4 or 5 bits one
// byte suffices, because the pages' own error is larger; rows that must be exact are multiplied as floats.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention/code_values.h"
#include "attention/rows.h"
#include "attention/sides_avx512.h"
#include "pages/codes.h"
#include "runtime/dispatch.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Whether rows are multiplied on AMX tiles, if the CPU has them. Integer products are bit-identical either
// way, so only speed decides (measured on Sapphire Rapids).
template <typename Code>
bool takes_tiles(int num_rows) {
  return num_rows >= (Code::kParts == 1 ? 20 : 16) && isa() == Isa::amx;
}

// Table for VPSHUFB: of(code) + offset for each of 16 codes, in every 128 bits.
template <class Of>
OCTAVO_INLINE __m512i table(Of of, int offset) {
  alignas(16) int8_t bytes[16];
  for (int code = 0; code < 16; ++code) bytes[code] = int8_t(of(code) + offset);
  return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}

OCTAVO_INLINE __m512i low_nibbles(__m512i codes) { return _mm512_and_si512(codes, _mm512_set1_epi8(15)); }
OCTAVO_INLINE __m512i high_nibbles(__m512i codes) { return low_nibbles(_mm512_srli_epi16(codes, 4)); }

// Looks up integers plus kShift for vectors of nibbles. `planes` has the lowest bits: bit 2 i of a word for
// the low nibble of byte i, and bit 2 i + 1 for the high one.
template <class Code, int kShift>
struct Lookup {
  __m512i values = table([](int code) { return Code::value(code); }, kShift);
  __m512i above = [] {
    if constexpr (Code::kPlanes)
      return table([](int code) { return Code::value(code) + Code::added(code); }, kShift);
    else return _mm512_setzero_si512();
  }();

  // `low_bit`: for each byte of a word, a mask of the plane's bit that belongs to its low nibble.
  __attribute__((always_inline)) void expand(__m512i codes, __m512i planes, __m512i low_bit, __m512i& low,
                                             __m512i& high) const {
    const __m512i low_codes = low_nibbles(codes), high_codes = high_nibbles(codes);
    low = _mm512_shuffle_epi8(values, low_codes);
    high = _mm512_shuffle_epi8(values, high_codes);
    if constexpr (Code::kPlanes) {
      low = _mm512_mask_shuffle_epi8(low, _mm512_test_epi8_mask(planes, low_bit), above, low_codes);
      high = _mm512_mask_shuffle_epi8(high, _mm512_test_epi8_mask(planes, _mm512_add_epi32(low_bit, low_bit)),
                                      above, high_codes);
    }
  }
};

OCTAVO_INLINE __m512i broadcast4(const void* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return _mm512_set1_epi32(four);
}

OCTAVO_INLINE __m512 halves(const uint8_t* from, __mmask16 mask) {
  return _mm512_maskz_cvtph_ps(mask, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Returns 256 * high + low: products with two-byte elements from the products with each byte.
OCTAVO_INLINE __m512i join(__m512i high, __m512i low) {
  return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}

// Loads words [word, word + 16) of 16 rows as columns: lane i of vector w is word w of row i; bytes from
// `stride` on become zeros.
OCTAVO_INLINE void load_columns(const uint8_t* from, int64_t stride, int word, __m512i (&columns)[16]) {
  const __mmask64 valid = ~uint64_t(0) >> (64 - std::min<int64_t>(64, stride - 4 * word));
#pragma GCC unroll 16
  for (int t = 0; t < 16; ++t) columns[t] = _mm512_maskz_loadu_epi8(valid, from + t * stride + 4 * word);
  transpose16(columns);
}

// Loads the scales of 16 rows, one per row.
template <class Code>
OCTAVO_INLINE __m512 load_row_scales(const uint8_t* from, int64_t stride, __mmask16 visible) {
  if constexpr (!Code::kPlanes) return halves(from, visible);
  alignas(32) uint16_t bits[16];
  for (int t = 0; t < 16; ++t) bits[t] = uint16_t(from[t * stride] << 7);
  return halves(reinterpret_cast<const uint8_t*>(bits), visible);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
