// Conversion of bf16 weights to 16-bit fixed point for linear/fixed_avx2.cpp. Internal linkage: see
// numeric.h.
#pragma once

#include <immintrin.h>

#include "linear/packed.h"
#include "runtime/unrolled.h"

namespace octavo::avx2 {
namespace {

constexpr int kStrip = 16;                      // outputs whose codes are adjacent
constexpr std::size_t kPairBytes = 4 * kPanel;  // bytes of a panel's weights for two inputs

// Returns 1.5 * 2^23. Adding it to a float leaves the nearest integer in the low bits of the sum.
inline __m256 magic() { return _mm256_set1_ps(0x1.8p23f); }

// Converts a pair of bf16 weights for each of eight outputs to codes, given the inverses of the steps.
inline __attribute__((always_inline)) __m256i fixed_pairs(__m256i words, __m256 factor) {
  const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
  const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(0xffff0000)));
  const __m256i first = _mm256_castps_si256(_mm256_fmadd_ps(even, factor, magic()));
  const __m256i second = _mm256_castps_si256(_mm256_fmadd_ps(odd, factor, magic()));
  return _mm256_blend_epi16(first, _mm256_slli_epi32(second, 16), 0xaa);
}

// Return eight outputs' steps (as bits or floats) or their inverses. Steps are stored as float32 exponents.
inline __m256i step_bits(const uint8_t* exponents) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(exponents));
  return _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
}
inline __m256 step_of(const uint8_t* exponents) { return _mm256_castsi256_ps(step_bits(exponents)); }
inline __m256 inverse_step(const uint8_t* exponents) {
  return _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_set1_epi32(254 << 23), step_bits(exponents)));
}

inline __m256i load_words(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// Converts a panel's group of `pairs` input pairs to codes, in strips [pairs][16].
inline void fix_group(const uint8_t* words, const uint8_t* exponents, int pairs, int32_t* codes) {
  constexpr int C = kPanel / 8;
  __m256 factors[C];
  unrolled<C>([&](auto c) __attribute__((always_inline)) { factors[c] = inverse_step(exponents + 8 * c); });
  for (int pair = 0; pair < pairs; ++pair, words += kPairBytes, codes += kStrip)
    unrolled<C>([&](auto c) __attribute__((always_inline)) {
      int32_t* const to = codes + c / 2 * (pairs * kStrip) + c % 2 * 8;
      _mm256_store_si256(reinterpret_cast<__m256i*>(to), fixed_pairs(load_words(words + 32 * c), factors[c]));
    });
}

}  // namespace
}  // namespace octavo::avx2
