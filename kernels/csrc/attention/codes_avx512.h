// Integer dot products (VNNI) for pages of codes. Codes represent small integers, so products with integer
// queries and weights are exact. Scales of K multiply scores, and scales of V multiply weights, as floats.
//
// Queries and softmax weights become 16-bit fixed point in two bytes, and vpdpbusd multiplies each byte.
// Their rounding error, 2^-16 of the largest element, is far below bf16's. For 16-bit queries over pages of 4
// or 5 bits one byte suffices unless results must be exact, because the pages' own error is larger.
#pragma once

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
  constexpr int kTiledRows = Code::kParts == 1 ? 20 : Code::kBits == 8 ? 16 : 8;
  return num_rows >= kTiledRows && isa() == Isa::amx;
}

// For K, kLargestValue is added to make integers unsigned; its contribution to a product is subtracted at the
// end.
struct Int8 : Nibble {
  static constexpr int kBits = 8, kScale = 1, kLargestValue = 128;
};

// Codes that are multiplied by queries and weights of one byte.
template <class Code>
struct InBytes : Code {
  static constexpr int kParts = 1;
};

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

// Loads 32-bit words of 16 rows, `stride` bytes apart, as columns: lane i of to[w] is word w of row i. An
// incomplete last word is filled up with zeros.
OCTAVO_INLINE void load_columns(const uint8_t* from, int64_t stride, __m512i* to) {
  if (stride == 4) {
    to[0] = _mm512_loadu_si512(from);
  } else if (stride == 8) {
    const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 64);
    alignas(64) static constexpr int32_t kIndices[16] = {0,  2,  4,  6,  8,  10, 12, 14,
                                                         16, 18, 20, 22, 24, 26, 28, 30};
    const __m512i even = _mm512_load_si512(kIndices), odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    to[0] = _mm512_permutex2var_epi32(a, even, b);
    to[1] = _mm512_permutex2var_epi32(a, odd, b);
  } else if (stride == 16) {
    const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 64);
    const __m512i c = _mm512_loadu_si512(from + 128), d = _mm512_loadu_si512(from + 192);
    alignas(64) static constexpr int32_t kIndices[16] = {0, 4, 8, 12, 16, 20, 24, 28,
                                                         0, 4, 8, 12, 16, 20, 24, 28};
    __m512i index = _mm512_load_si512(kIndices);
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
      const __m512i lower = _mm512_permutex2var_epi32(a, index, b),
                    upper = _mm512_permutex2var_epi32(c, index, d);
      to[w] = _mm512_mask_mov_epi32(lower, 0xff00, upper);
      index = _mm512_add_epi32(index, _mm512_set1_epi32(1));
    }
  } else {
    for (int64_t at = 0; at < stride; at += 4, ++to) {
      alignas(64) uint32_t words[16] = {};
      for (int t = 0; t < 16; ++t)
        std::memcpy(words + t, from + t * stride + at, size_t(stride - at < 4 ? stride - at : 4));
      *to = _mm512_load_si512(words);
    }
  }
}

// Loads the scales of 16 rows, one per row.
template <class Code>
OCTAVO_INLINE __m512 load_row_scales(const uint8_t* from, int64_t stride, __mmask16 visible) {
  if constexpr (!Code::kPlanes) return halves(from, visible);
  __m512i columns[kMaxDim / 32];
  load_columns(from, stride, columns);
  const __m512i bits = _mm512_slli_epi32(_mm512_and_si512(columns[0], _mm512_set1_epi32(255)), 7);
  return _mm512_maskz_cvtph_ps(visible, _mm512_cvtepi32_epi16(bits));
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
