// nvfp4 codes: 4 bits, with a scale for each group of a row's dims.
#pragma once

#include "attention/bytes_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kSlots = kChunk / kNvGroup;  // groups per chunk

// nvfp4: E2M1 codes. A value is its group's scale times Code::value / kScale.
struct Nvfp4 : Fp4 {
  // E4M3 bytes are shifted and read as float16, which gives 2^-8 times the scale.
  static constexpr float kScale = 2 * 0x1p-8f;
  // Byte of a scale near 1, which replaces the scales of invisible rows. Tiny scales would give subnormal
  // products, which take 100 times as long.
  static constexpr int kAnyScale = 56;
  // Interleaves pairs of bytes of two groups, in each 128 bits.
  OCTAVO_INLINE __m256i arranged(__m256i codes) {
    return _mm256_shuffle_epi8(codes, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4,
                                                                                5, 12, 13, 6, 7, 14, 15)));
  }
  static constexpr int byte_at(int place) {
    return place / 16 * 16 + place / 2 % 2 * 8 + place % 16 / 4 * 2 + place % 2;
  }
  OCTAVO_INLINE __m256 decode(__m128i bytes) {
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 7));
  }
  // Returns a row's group scales for kChunks chunks, in the lane order of group_keys_avx2.cpp.
  template <int kChunks>
  OCTAVO_INLINE __m256 key_scales(const uint8_t* row) {
    if constexpr (kChunks == 2) {
      const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row));
      return decode(_mm_shuffle_epi8(eight, _mm_set1_epi64x(0x0706030205040100)));
    }
    int32_t four;
    std::memcpy(&four, row, 4);
    const __m128i all = _mm_cvtsi32_si128(four);
    return decode(_mm_unpacklo_epi8(all, all));
  }
  // Loads the group scales of two sets of 16 rows: lanes alternate between `first` and `second`.
  OCTAVO_INLINE void tile_scales(const uint8_t* first, const uint8_t* second, int stride, float* to) {
    for (int i = 0; i < 16 * stride; i += 8, to += 16) {
      const __m128i both = _mm_unpacklo_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(first + i)),
                                             _mm_loadl_epi64(reinterpret_cast<const __m128i*>(second + i)));
      _mm256_storeu_ps(to, decode(both));
      _mm256_storeu_ps(to + 8, decode(_mm_unpackhi_epi64(both, both)));
    }
  }
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
