// Rows of codes as floats: bit-identical to dequantize_row, on AVX2 16 values at a time.
//
// Twice a value of E2M1 is a small integer, which is multiplied by half the scale: the same real product, so
// the same rounding.
#pragma once

#include "attention/sides.h"
#include "pages/codes.h"

#if defined(__AVX2__)
#define OCTAVO_EXPAND_AVX2
#include <immintrin.h>
#endif

namespace octavo::OCTAVO_ISA {
namespace {

#ifdef OCTAVO_EXPAND_AVX2

// Codes of 16 values, as bytes in order.
OCTAVO_INLINE __m128i load_bytes(const uint8_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
OCTAVO_INLINE __m128i load_nibbles(const uint8_t* from) {
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  const __m128i both = _mm_unpacklo_epi8(eight, _mm_srli_epi16(eight, 4));
  return _mm_and_si128(both, _mm_set1_epi8(15));
}

// to[i] = integers[i] * scale, and + bias where kBias; kSigned: of int8, not uint8.
template <bool kSigned, bool kBias>
OCTAVO_INLINE void store_scaled(__m128i integers, __m256 scale, __m256 bias, float* to) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m256i wide = kSigned ? _mm256_cvtepi8_epi32(integers) : _mm256_cvtepu8_epi32(integers);
    const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(wide), scale);
    _mm256_storeu_ps(to + 8 * half, kBias ? _mm256_add_ps(scaled, bias) : scaled);
    integers = _mm_unpackhi_epi64(integers, integers);
  }
}

// Converts `count` nibbles to their values in `table`.
OCTAVO_INLINE void expand_nibbles(const uint8_t* codes, int count, __m128i table, float scale, float* to) {
  const __m256 factor = _mm256_set1_ps(scale);
  for (int i = 0; i < count; i += 16)
    store_scaled<true, false>(_mm_shuffle_epi8(table, load_nibbles(codes + i / 2)), factor, factor, to + i);
}

// A scale and a bias for each group.
template <int kBits>
OCTAVO_INLINE void expand_affine(const uint8_t* codes, const uint8_t* scales, int dim, float* row) {
  for (int at = 0; at < dim; at += kAffineGroup, scales += 4) {
    const __m256 scale = _mm256_set1_ps(load_half(scales)), bias = _mm256_set1_ps(load_half(scales + 2));
    for (int i = at; i < at + kAffineGroup; i += 16)
      store_scaled<false, true>(kBits == 4 ? load_nibbles(codes + i / 2) : load_bytes(codes + i), scale, bias,
                                row + i);
  }
}

inline void expand_row(const RowFormat& format, const uint8_t* codes, const uint8_t* scales, float* row) {
  const int dim = format.dim;
  const __m128i twice_e2m1 = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  const __m128i signed4 = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  if (dim % 16 != 0) return dequantize_row(format, codes, scales, row);
  switch (format.codes) {
    case CodeType::fp4: return expand_nibbles(codes, dim, twice_e2m1, load_half(scales) * 0.5f, row);
    case CodeType::int4: return expand_nibbles(codes, dim, signed4, load_half(scales), row);
    case CodeType::mxfp4:
      for (int at = 0; at < dim; at += kMxGroup)
        expand_nibbles(codes + at / 2, kMxGroup, twice_e2m1, e8m0(scales[at / kMxGroup]) * 0.5f, row + at);
      return;
    case CodeType::nvfp4:
      for (int at = 0; at < dim; at += kNvGroup)
        expand_nibbles(codes + at / 2, kNvGroup, twice_e2m1, e4m3(scales[at / kNvGroup]) * 0.5f, row + at);
      return;
    case CodeType::int8: {
      const __m256 scale = _mm256_set1_ps(load_half(scales));
      for (int i = 0; i < dim; i += 16)
        store_scaled<true, false>(load_bytes(codes + i), scale, scale, row + i);
      return;
    }
    case CodeType::affine8: return expand_affine<8>(codes, scales, dim, row);
    case CodeType::affine4: return expand_affine<4>(codes, scales, dim, row);
    default: return dequantize_row(format, codes, scales, row);
  }
}

#else

inline void expand_row(const RowFormat& format, const uint8_t* codes, const uint8_t* scales, float* row) {
  dequantize_row(format, codes, scales, row);
}

#endif

}  // namespace
}  // namespace octavo::OCTAVO_ISA
