// Codes of 4 bits with a scale (and a bias) for each group of a row's dims: mxfp4, nvfp4 and affine4.
#pragma once

#include "attention/bytes_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

// kSlots: groups of a chunk. A code is worth its scale times Code::value / kScale.
//
// key_scales, key_biases: of a row's chunk, and the one after it if kChunks is 2, by lane of
// group_keys_avx2.cpp.
//
// tile_scales: of the groups of two times 16 rows, those of the first ones in even lanes and of the second
// ones in odd lanes, of affine4 beside its biases. Scales of a row are `stride` bytes, a multiple of
// kScaleBytes, and become whole vectors. Bytes of kAnyScale are scales near 1: of small ones products would
// be subnormal, which take a hundred times as long.
template <class Decode>
OCTAVO_INLINE void decode_side_by_side(const uint8_t* first, const uint8_t* second, int bytes, float* to,
                                       Decode decode) {
  for (int i = 0; i < bytes; i += 8, to += 16) {
    const __m128i both = _mm_unpacklo_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(first + i)),
                                           _mm_loadl_epi64(reinterpret_cast<const __m128i*>(second + i)));
    _mm256_storeu_ps(to, decode(both));
    _mm256_storeu_ps(to + 8, decode(_mm_unpackhi_epi64(both, both)));
  }
}

struct Mxfp4 : Fp4 {
  static constexpr bool kBias = false;
  static constexpr int kSlots = kChunk / kMxGroup, kScaleBytes = 4, kAnyScale = 127;
  // The groups of a chunk one after the other.
  OCTAVO_INLINE __m256i arranged(__m256i codes) { return _mm256_permute4x64_epi64(codes, 0xd8); }
  static constexpr int byte_at(int place) { return place / 8 % 2 * 16 + place / 16 * 8 + place % 8; }
  // E8M0: 0 stands for 2^-127.
  OCTAVO_INLINE __m256 decode(__m256i bytes) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(bytes, 23), _mm256_set1_epi32(1 << 22)));
  }
  template <int kChunks>
  OCTAVO_INLINE __m256 key_scales(const uint8_t* row) {
    int32_t four = 0;
    std::memcpy(&four, row, 2 * kChunks);
    const __m256i spread = kChunks == 2 ? _mm256_setr_epi32(-256, -256, -254, -254, -255, -255, -253, -253)
                                        : _mm256_setr_epi32(-256, -256, -256, -256, -255, -255, -255, -255);
    return decode(_mm256_shuffle_epi8(_mm256_set1_epi32(four), spread));
  }
  OCTAVO_INLINE void tile_scales(const uint8_t* first, const uint8_t* second, int stride, float* to, float*) {
    decode_side_by_side(first, second, 16 * stride, to,
                        [](__m128i bytes) { return decode(_mm256_cvtepu8_epi32(bytes)); });
  }
};

struct Nvfp4 : Fp4 {
  static constexpr bool kBias = false;
  static constexpr int kSlots = kChunk / kNvGroup, kScaleBytes = 4, kAnyScale = 56;
  // Scales are E4M3, which are the upper bits of halves that are 2^8 times as small.
  static constexpr float kScale = 2 * 0x1p-8f;
  // Two bytes of either group of 128 bits by turns.
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
  OCTAVO_INLINE void tile_scales(const uint8_t* first, const uint8_t* second, int stride, float* to, float*) {
    decode_side_by_side(first, second, 16 * stride, to, [](__m128i bytes) { return decode(bytes); });
  }
};

struct Affine4 : Nibble {
  static constexpr bool kBias = true, kUnsigned = true;
  static constexpr int kSlots = kChunk / kAffineGroup, kScaleBytes = 8, kAnyScale = 60;
  static constexpr int kScale = 1, kLargestValue = 15;
  static constexpr int value(int code) { return code; }
  // Scales and biases by turns.
  template <int kChunks>
  OCTAVO_INLINE __m256 decode(const uint8_t* row) {
    int64_t both = 0;
    std::memcpy(&both, row, 4 * kChunks);
    return _mm256_castps128_ps256(_mm_cvtph_ps(_mm_cvtsi64_si128(both)));
  }
  template <int kChunks>
  OCTAVO_INLINE __m256 key_scales(const uint8_t* row) {
    const int second = kChunks == 2 ? 2 : 0;
    return _mm256_permutevar8x32_ps(decode<kChunks>(row),
                                    _mm256_setr_epi32(0, 0, second, second, 0, 0, second, second));
  }
  template <int kChunks>
  OCTAVO_INLINE __m256 key_biases(const uint8_t* row) {
    const int second = kChunks == 2 ? 3 : 1;
    return _mm256_permutevar8x32_ps(decode<kChunks>(row),
                                    _mm256_setr_epi32(1, 1, second, second, 1, 1, second, second));
  }
  OCTAVO_INLINE void tile_scales(const uint8_t* first, const uint8_t* second, int stride, float* to,
                                 float* biases) {
    const bool even = stride % 16 == 0;
    for (int i = 0; i < 16; ++i) {
      for (int at = 0; at < stride; at += 8, first += 8, second += 8, to += 4, biases += 4) {
        const __m256 all =
            _mm256_cvtph_ps(_mm_unpacklo_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(first)),
                                               _mm_loadl_epi64(reinterpret_cast<const __m128i*>(second))));
        const __m256 apart = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(all), 0xd8));
        _mm_storeu_ps(to, _mm256_castps256_ps128(apart));
        _mm_storeu_ps(biases, _mm256_extractf128_ps(apart, 1));
      }
      if (even) continue;
      _mm_storeu_ps(to, _mm_setzero_ps());
      _mm_storeu_ps(biases, _mm_setzero_ps());
      to += 4, biases += 4;
    }
  }
};

// What `of` gives for the class of these codes; null for codes without one.
template <class Side, class Of>
const Side* group_side_of(CodeType codes, Of of) {
  switch (codes) {
    case CodeType::mxfp4: return of(Mxfp4{});
    case CodeType::nvfp4: return of(Nvfp4{});
    case CodeType::affine4: return of(Affine4{});
    default: return nullptr;
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
