// Operations on vectors of weights for which GCC has no operator or generates slow code. Compiled for each
// instruction set.
#pragma once

#include "runtime/vectors.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace octavo::OCTAVO_ISA {
namespace {

// Number of doubles computed together: one register. (Wider vectors of doubles would pass through memory.)
constexpr int kWidth = kLanes / 2;
typedef float Half __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
typedef int32_t HalfBits __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(8 * kWidth)));

constexpr int kAligned = 64;  // alignment of vectors that are written and read again

inline Half load_half(const float* from) { return *reinterpret_cast<const Half*>(from); }

// Returns the values, with values below `bound` replaced by 0.
inline Half only_from(Half values, float bound) {
  return (Half)((HalfBits)values & (values >= Half{} + bound));
}

inline Doubles widen(Half values) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_cvtps_pd((__m256)values);
#elif defined(__AVX2__)
  return (Doubles)_mm256_cvtps_pd((__m128)values);
#else
  return __builtin_convertvector(values, Doubles);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each mask of lanes, a permutation that moves these lanes to the front.
struct Moves {
  alignas(8) int8_t from[256][8];

  constexpr Moves() : from{} {
    for (int set = 0; set < 256; ++set)
      for (int lane = 0, to = 0; lane < 8; ++lane)
        if (set >> lane & 1) from[set][to++] = static_cast<int8_t>(lane);
  }
};
constexpr Moves kMoves;
#endif

// Writes the values in [low, high) in order, then arbitrary ones up to kLanes; returns their number.
inline int keep_between(Vec value, Vec low, Vec high, float* to) {
#if defined(__AVX512F__)
  const __mmask16 kept = _mm512_cmp_ps_mask((__m512)value, (__m512)low, _CMP_GE_OQ) &
                         ~_mm512_cmp_ps_mask((__m512)value, (__m512)high, _CMP_GE_OQ);
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(kept, (__m512)value));
  return __builtin_popcount(kept);
#elif defined(__AVX2__)
  const int kept = _mm256_movemask_ps((__m256)((value >= low) & (value < high)));
  const __m256i from =
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kMoves.from[kept])));
  _mm256_storeu_ps(to, _mm256_permutevar8x32_ps((__m256)value, from));
  return __builtin_popcount(kept);
#else
  const IntVec kept = (value >= low) & (value < high);
  int count = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    to[count] = value[lane];
    count -= kept[lane];
  }
  return count;
#endif
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
