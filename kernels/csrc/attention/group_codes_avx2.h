// Codes of 4 bits with a scale (and a bias) for each group of a row's dims: mxfp4, nvfp4 and affine4.
#pragma once

#include "attention/bytes_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

// kSlots: groups of a chunk. `scales`: of the chunk's dims 8 l to 8 l + 7 in lane l; what a code is worth is
// that times Code::value. `row_scales`: of a row of `chunks` chunks, slot by slot; of nvfp4 a chunk's slots
// are groups 0 2 1 3, else as they are.
struct Mxfp4 : Fp4 {
  static constexpr bool kBias = false;
  static constexpr int kSlots = kChunk / kMxGroup;
  OCTAVO_INLINE __m256 scales(const uint8_t* row, int chunk) {
    uint16_t two;
    std::memcpy(&two, row + chunk * kSlots, 2);
    const __m256i spread = _mm256_setr_epi32(-256, -256, -256, -256, -255, -255, -255, -255);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi16(int16_t(two)), spread);
    // E8M0: 0 stands for 2^-127.
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(bytes, 23), _mm256_set1_epi32(1 << 22)));
  }
  OCTAVO_INLINE void row_scales(const uint8_t* row, int chunks, float* to, float*) {
    const auto decode = [](int bytes) {
      const __m128i bits = _mm_slli_epi32(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(bytes)), 23);
      return _mm_castsi128_ps(_mm_max_epi32(bits, _mm_set1_epi32(1 << 22)));
    };
    for (; chunks >= 2; chunks -= 2, row += 4, to += 4) {
      int32_t four;
      std::memcpy(&four, row, 4);
      _mm_storeu_ps(to, decode(four));
    }
    if (chunks > 0) {
      uint16_t two;
      std::memcpy(&two, row, 2);
      _mm_storel_pi(reinterpret_cast<__m64*>(to), decode(two));
    }
  }
};

struct Nvfp4 : Fp4 {
  static constexpr bool kBias = false;
  static constexpr int kSlots = kChunk / kNvGroup;
  OCTAVO_INLINE __m256 scales(const uint8_t* row, int chunk) {
    int32_t four;
    std::memcpy(&four, row + chunk * kSlots, 4);
    const __m256i spread = _mm256_setr_epi32(-256, -256, -255, -255, -254, -254, -253, -253);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(four), spread);
    // E4M3, as the upper bits of a float that is 2^120 times as small.
    return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(bytes, 20)), _mm256_set1_ps(0x1p120f));
  }
  OCTAVO_INLINE void row_scales(const uint8_t* row, int chunks, float* to, float*) {
    for (; chunks > 0; --chunks, row += kSlots, to += kSlots) {
      int32_t four;
      std::memcpy(&four, row, 4);
      const __m128i order = _mm_setr_epi32(-256, -254, -255, -253);
      const __m128i bits = _mm_slli_epi32(_mm_shuffle_epi8(_mm_cvtsi32_si128(four), order), 20);
      _mm_storeu_ps(to, _mm_mul_ps(_mm_castsi128_ps(bits), _mm_set1_ps(0x1p120f)));
    }
  }
};

struct Affine4 : Nibble {
  static constexpr bool kBias = true, kUnsigned = true;
  static constexpr int kSlots = kChunk / kAffineGroup;
  static constexpr int kScale = 1, kLargestValue = 15;
  static constexpr int value(int code) { return code; }
  // And biases, which lie beside them.
  OCTAVO_INLINE void row_scales(const uint8_t* row, int chunks, float* to, float* biases) {
    for (; chunks >= 2; chunks -= 2, row += 8, to += 2, biases += 2) {
      const __m128 all = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row)));
      const __m128 apart = _mm_shuffle_ps(all, all, 0xd8);
      _mm_storel_pi(reinterpret_cast<__m64*>(to), apart);
      _mm_storeh_pi(reinterpret_cast<__m64*>(biases), apart);
    }
    if (chunks > 0) {
      uint16_t two[2];
      std::memcpy(two, row, 4);
      *to = _cvtsh_ss(two[0]);
      *biases = _cvtsh_ss(two[1]);
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
