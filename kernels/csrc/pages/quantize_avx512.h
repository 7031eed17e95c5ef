// Conversion of rows to codes on AVX-512, in registers, bit-identical to pages/quantize.h, for fp4
// and fp5 rows whose length is a power of two from 64 to 256. Internal linkage.
//
// The index of the nearest of 2^n magnitudes is found by binary search in tables of edges. Comparisons with
// edges alternate between ">" and ">=" (ties to the even index); x > e is tested as x >= the float after e.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "attention/rows.h"
#include "pages/quantize_row.h"
#include "runtime/numeric.h"

namespace octavo {
namespace {

// Tables for the search in a grid of 2^kBits magnitudes. They are compile-time constants, because code of
// this file must not run at load, before the CPU has been checked.
template <int kBits>
struct Grid {
  alignas(64) float values[16];
  alignas(64) float edges[kBits][16];  // all elements of the first vector are equal

  constexpr explicit Grid(const float (&magnitudes)[1 << kBits]) : values(), edges() {
    constexpr int kMask = (1 << kBits) - 1;
    for (int i = 0; i < 16; ++i) {
      values[i] = magnitudes[i & kMask];
      for (int bit = kBits - 1; bit >= 0; --bit) {  // bits of the index above `bit` are already found
        const int from = ((i & kMask) >> (bit + 1) << (bit + 1)) | 1 << bit;
        edges[kBits - 1 - bit][i] = (magnitudes[from - 1] + magnitudes[from]) / 2;
      }
    }
  }
};

// Tables times one scale. An edge below an odd index becomes the next larger float, so >= acts as >.
template <int kBits>
struct ScaledGrid {
  __m512 values;
  __m512 edges[kBits];

  ScaledGrid(const Grid<kBits>& grid, float scale) {
    const __m512 by = _mm512_set1_ps(scale);
    values = _mm512_mul_ps(_mm512_loadu_ps(grid.values), by);
#pragma GCC unroll 4
    for (int at = 0; at < kBits; ++at) edges[at] = _mm512_mul_ps(_mm512_loadu_ps(grid.edges[at]), by);
    // Only edges of the lowest bit are below odd indices.
    const __m512i after = _mm512_add_epi32(_mm512_castps_si512(edges[kBits - 1]), _mm512_set1_epi32(1));
    edges[kBits - 1] = _mm512_castsi512_ps(after);
  }

  __attribute__((always_inline)) __m512i index(__m512 magnitude) const {
    __m512i index = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int at = 0; at < kBits; ++at) {
      const __m512 edge = at == 0 ? edges[0] : _mm512_permutexvar_ps(index, edges[at]);
      const __mmask16 passed = _mm512_cmp_ps_mask(magnitude, edge, _CMP_GE_OQ);
      index = _mm512_mask_add_epi32(index, passed, index, _mm512_set1_epi32(1 << (kBits - 1 - at)));
    }
    return index;
  }

  __attribute__((always_inline)) __m512 squared_error(__m512 magnitude) const {
    const __m512 difference = _mm512_sub_ps(magnitude, _mm512_permutexvar_ps(index(magnitude), values));
    return _mm512_mul_ps(difference, difference);
  }
};

constexpr float kE2m1Magnitudes[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
constexpr float kE2m2Magnitudes[16] = {0, .25f, .5f, .75f, 1, 1.25f, 1.5f, 1.75f,
                                       2, 2.5f, 3,   3.5f, 4, 5,     6,    7};

template <int kBits>
constexpr Grid<kBits> kGrid(kE2m1Magnitudes);
template <>
constexpr Grid<4> kGrid<4>(kE2m2Magnitudes);

// Sums vectors by repeatedly adding the upper half to the lower half, in the order of halving_sum.
template <int kVectors>
inline __attribute__((always_inline)) float halving_sum_of(__m512 (&values)[kVectors]) {
#pragma GCC unroll 4
  for (int count = kVectors / 2; count > 0; count /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) values[i] = _mm512_add_ps(values[i], values[i + count]);
  return _mm512_reduce_add_ps(values[0]);
}

// A row's magnitudes and signs, and whether all are finite.
template <int kVectors>
struct Magnitudes {
  __m512 at[kVectors];
  __mmask16 negative[kVectors];
  float largest;
  bool finite;

  explicit Magnitudes(const float* row) {
    __m512 top = _mm512_setzero_ps();
    __mmask16 all = 0xffff;
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      const __m512 x = _mm512_loadu_ps(row + 16 * i);
      negative[i] = _mm512_movepi32_mask(_mm512_castps_si512(x));
      at[i] = _mm512_abs_ps(x);
      all &= _mm512_cmp_ps_mask(at[i], _mm512_set1_ps(3.402823466e38f), _CMP_LE_OQ);
      top = _mm512_max_ps(at[i], top);
    }
    finite = all == 0xffff;
    largest = _mm512_reduce_max_ps(top);
  }
};

// Packs 16 codes of four bits into 8 bytes.
inline __attribute__((always_inline)) void store_nibbles(__m512i codes, uint8_t* to) {
  const __m512i pairs = _mm512_or_si512(codes, _mm512_srli_epi64(codes, 28));
  const __m128i bytes = _mm512_cvtepi64_epi8(pairs);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), bytes);
}

inline __attribute__((always_inline)) __m512i with_sign(__m512i codes, __mmask16 negative) {
  return _mm512_mask_add_epi32(codes, negative, codes, _mm512_set1_epi32(8));
}

// Candidate scales. All errors are computed first, because branches would often be mispredicted.
template <class Scale>
struct Choice {
  Scale scales[kCandidates];
  float errors[kCandidates];

  // Returns the nonzero candidate with the smallest error, the first of equals; 0 if there is none.
  Scale best() const {
    Scale best = scales[0];
    float least = errors[0];
    for (int c = 1; c < kCandidates; ++c) {
      const bool better = (scales[c] != 0) & ((best == 0) | (errors[c] < least));
      best = better ? scales[c] : best;
      least = better ? errors[c] : least;
    }
    return best;
  }
};

template <class Format, int kVectors>
bool store_fp_of(const float* row, uint8_t* codes, uint8_t* scales) {
  constexpr __mmask16 kCoarse = (1 << kFp5Coarse) - 1;
  constexpr int kBits = Format::kPlanes ? 4 : 3;
  const Magnitudes<kVectors> x(row);
  if (!x.finite) return false;
  Choice<typename Format::Scale> choice;
  for (int c = 0; c < kCandidates; ++c) {
    choice.scales[c] = Format::candidate(x.largest, c);
    const ScaledGrid<kBits> grid(kGrid<kBits>, Format::value(choice.scales[c]));
    __m512 errors[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) errors[i] = grid.squared_error(x.at[i]);
    if constexpr (Format::kPlanes) {
      const ScaledGrid<3> coarse(kGrid<3>, Format::value(choice.scales[c]));
      errors[0] = _mm512_mask_mov_ps(errors[0], kCoarse, coarse.squared_error(x.at[0]));
    }
    choice.errors[c] = halving_sum_of<kVectors>(errors);
  }
  const auto best = choice.best();
  if (best == 0) {
    std::memset(codes, 0, size_t(kVectors) * 8);
    std::memset(scales, 0, Format::kPlanes ? size_t(kVectors) * 2 : sizeof best);
    return true;
  }
  const ScaledGrid<kBits> grid(kGrid<kBits>, Format::value(best));
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    __m512i index = grid.index(x.at[i]);
    if constexpr (Format::kPlanes) {
      if (i == 0) {
        const __m512i doubled = ScaledGrid<3>(kGrid<3>, Format::value(best)).index(x.at[0]);
        index = _mm512_mask_add_epi32(index, kCoarse, doubled, doubled);
      }
      const uint16_t lowest = _mm512_test_epi32_mask(index, _mm512_set1_epi32(1));
      std::memcpy(scales + 2 * i, &lowest, 2);
      index = _mm512_srli_epi32(index, 1);
    }
    store_nibbles(with_sign(index, x.negative[i]), codes + 8 * i);
  }
  std::memcpy(scales, &best, sizeof best);
  return true;
}

}  // namespace
}  // namespace octavo
