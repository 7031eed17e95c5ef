// Conversion of rows to codes on AVX-512, in registers, bit-identical to pages/quantize.h and
// pages/quantize_fp5.h. It supports fp4 and fp5 rows whose length is a power of two from 64 to 256. Internal
// linkage.
//
// The index of the nearest of 2^n magnitudes is found by binary search in tables of edges. Comparisons with
// edges alternate between ">" and ">=" (ties to the even index); x > e is tested as x >= the float after e.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "attention/rows.h"
#include "pages/quantize_fp5.h"
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

constexpr Grid<3> kE2m1Grid(kE2m1Magnitudes);
constexpr Grid<4> kE2m2Grid(kE2m2Magnitudes);

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

// Number of candidate scales. All errors are computed first, because branches would often be mispredicted.
constexpr int kCandidates = 5;
static_assert(std::size(kScaleFactors) == kCandidates && std::size(kScaleSteps) == kCandidates);

template <class Scale>
struct Choice {
  Scale scales[kCandidates];
  float errors[kCandidates];

  // Returns the candidate with the smallest error of those that are not 0, the first of equals; or 0.
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

// Computes fp4's scale as it is defined, with exact errors; rarely needed, so it is not inlined.
template <int kVectors>
[[gnu::noinline]] uint16_t fp4_scale_by_errors(const float* row) {
  const Magnitudes<kVectors> x(row);
  Choice<uint16_t> choice;
  for (int c = 0; c < kCandidates; ++c) {
    choice.scales[c] = float_to_f16(std::min(x.largest * kScaleFactors[c], kMaxHalf));
    const ScaledGrid<3> grid(kE2m1Grid, f16_to_float(choice.scales[c]));
    __m512 errors[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) errors[i] = grid.squared_error(x.at[i]);
    choice.errors[c] = halving_sum_of<kVectors>(errors);
  }
  return choice.best();
}

// Maps quarters of a scale to points of fp4's grid: for each multiple of 1/4, the point nearest to values up
// to the next multiple, in steps of 2^-13. (All edges are multiples of 1/4.)
struct NearestPoints {
  alignas(64) uint16_t at[32];

  constexpr NearestPoints() : at() {
    for (int i = 0, point = 0; i < 32; ++i) {
      const float middle = float(i) / 4 + 0.125f;
      while (point < 7 && middle > (kE2m1Magnitudes[point] + kE2m1Magnitudes[point + 1]) / 2) ++point;
      at[i] = uint16_t(kE2m1Magnitudes[point] * 8192);
    }
  }
};
constexpr NearestPoints kNearestPoints;

// Lanes of the result of `sums_of` that are sums of different candidates.
constexpr uint32_t kCandidateLanes = 0x1f;
alignas(64) constexpr float kFactorLanes[16] = {
    kScaleFactors[0], kScaleFactors[1], kScaleFactors[2], kScaleFactors[3],
    kScaleFactors[4], kScaleFactors[4], kScaleFactors[4], kScaleFactors[4],
    kScaleFactors[0], kScaleFactors[1], kScaleFactors[2], kScaleFactors[3],
    kScaleFactors[4], kScaleFactors[4], kScaleFactors[4], kScaleFactors[4]};

// Sums each of five vectors over its lanes; the sums are lanes 0 to 4. Lanes 5 to 7 repeat the last sum, and
// the upper half repeats the lower.
inline __attribute__((always_inline)) __m512 sums_of(const __m512 (&vectors)[kCandidates]) {
  const auto ints = [](__m512 x) { return _mm512_castps_si512(x); };
  const auto floats = [](__m512i x) { return _mm512_castsi512_ps(x); };
  const auto by_ones = [&](__m512 a, __m512 b) {
    return _mm512_add_ps(floats(_mm512_unpacklo_epi32(ints(a), ints(b))),
                         floats(_mm512_unpackhi_epi32(ints(a), ints(b))));
  };
  const auto by_twos = [&](__m512 a, __m512 b) {
    return _mm512_add_ps(floats(_mm512_unpacklo_epi64(ints(a), ints(b))),
                         floats(_mm512_unpackhi_epi64(ints(a), ints(b))));
  };
  const auto by_fours = [&](__m512 a, __m512 b) {
    return _mm512_add_ps(floats(_mm512_shuffle_i32x4(ints(a), ints(b), 0x88)),
                         floats(_mm512_shuffle_i32x4(ints(a), ints(b), 0xdd)));
  };
  const __m512 first = by_twos(by_ones(vectors[0], vectors[1]), by_ones(vectors[2], vectors[3]));
  const __m512 last = by_ones(vectors[4], vectors[4]);
  const __m512 sums = by_fours(first, by_twos(last, last));
  return by_fours(sums, sums);
}

// Finds the scale that the format's definition (kernels/formats/fp4.py) finds, but faster: an integer
// estimate of each candidate's error usually leaves only one that can be the best, and otherwise exact errors
// decide. How far an estimate can be off: in units of a candidate scale, a magnitude is q = x / scale < 7, in
// steps of 2^-13. Three roundings affect q: x as a 16-bit word (half of 65535 steps up to the largest), the
// factor from words to q, and the truncated product. They are below 0.43, 0.5 and 1 step. So each distance
// from the nearest point is off by less than 2^-12, and a sum E of n squares by less than 2^-11 sqrt(n E) <=
// 2^-14 n + 2^-10 E. (The rest, 2^-24 n and roundings of floats, is less than the margin of 2 steps
// over 1.96.) The definition's sums are within 2^-20 of the true ones.
template <int kVectors>
inline __attribute__((always_inline)) uint16_t fp4_scale(const float* row, float top) {
  static_assert(kVectors <= 16);
  constexpr int kWords = kVectors / 2;
  constexpr float kWordSteps = 8192.0f * 65536 / 65535;  // the product's upper word is divided by 65536
  if (!(top >= 0x1p-11f && top <= 0x1p17f)) return fp4_scale_by_errors<kVectors>(row);
  const __m512 largest = _mm512_set1_ps(top);
  const __m256i halves = _mm512_cvtps_ph(_mm512_mul_ps(largest, _mm512_load_ps(kFactorLanes)),
                                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 scales = _mm512_cvtph_ps(halves);
  const __m512i factors =
      _mm512_cvtps_epi32(_mm512_div_ps(_mm512_mul_ps(largest, _mm512_set1_ps(kWordSteps)), scales));
  const __m512 steps = _mm512_set1_ps(65535 / top);
  const auto steps_of = [&](const float* from) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_abs_ps(_mm512_loadu_ps(from)), steps));
  };
  __m512i words[kWords];
#pragma GCC unroll 8
  for (int i = 0; i < kWords; ++i)
    words[i] = _mm512_packus_epi32(steps_of(row + 32 * i), steps_of(row + 32 * i + 16));
  const __m512i points = _mm512_load_si512(kNearestPoints.at);
  __m512 units[kCandidates];
#pragma GCC unroll 5
  for (int c = 0; c < kCandidates; ++c) {
    const __m512i factor = _mm512_permutexvar_epi16(_mm512_set1_epi16(int16_t(2 * c)), factors);
    __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < kWords; ++i) {
      const __m512i q = _mm512_mulhi_epu16(words[i], factor);
      const __m512i point = _mm512_permutexvar_epi16(_mm512_srli_epi16(q, 11), points);
      const __m512i distance = _mm512_sub_epi16(q, point);
      sum = _mm512_dpwssd_epi32(sum, distance, distance);  // at most 2^30
    }
    units[c] = _mm512_cvtepi32_ps(sum);
  }
  const __m512 square = _mm512_mul_ps(_mm512_mul_ps(scales, scales), _mm512_set1_ps(0x1p-26f));
  const __m512 error = _mm512_mul_ps(sums_of(units), square);
  const __m512 off = _mm512_fmadd_ps(error, _mm512_set1_ps(0x1p-10f),
                                     _mm512_mul_ps(square, _mm512_set1_ps(16 * kVectors * 0x1p12f)));
  __m512i most = _mm512_castps_si512(_mm512_add_ps(error, off));  // not negative: bits keep the order
  most = _mm512_min_epi32(most, _mm512_shuffle_i32x4(most, most, 0xb1));
  most = _mm512_min_epi32(most, _mm512_shuffle_epi32(most, _MM_PERM_ENUM(0x4e)));
  most = _mm512_min_epi32(most, _mm512_shuffle_epi32(most, _MM_PERM_ENUM(0xb1)));
  const __mmask16 may_be_least =
      _mm512_cmp_ps_mask(_mm512_sub_ps(error, off), _mm512_castsi512_ps(most), _CMP_LE_OQ);
  const uint32_t candidates = may_be_least & kCandidateLanes;
  if ((candidates & (candidates - 1)) != 0) return fp4_scale_by_errors<kVectors>(row);
  alignas(32) uint16_t of_lanes[16];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(of_lanes), halves);
  return of_lanes[std::countr_zero(candidates)];
}

// Rows computed together. Each operation is applied to all of these rows in turn, because one row's
// operations depend on each other.
constexpr int kRowsTogether = 8;

// Stores adjacent rows of 16 kVectors values. A row that cannot be stored sets its `storable` to false and
// writes nothing; other rows leave `storable` unchanged.
template <int kVectors>
void store_fp4_rows(const float* rows, int count, uint8_t* const* codes, uint8_t* const* scales,
                    bool* storable) {
  constexpr int kSize = 16 * kVectors;
  float largest[kRowsTogether];
  uint16_t halves[kRowsTogether];
  for (int r = 0; r < count; ++r) {
    const Magnitudes<kVectors> x(rows + r * kSize);
    largest[r] = x.largest;
    storable[r] = x.finite;
  }
  for (int r = 0; r < count; ++r) halves[r] = fp4_scale<kVectors>(rows + r * kSize, largest[r]);
  for (int r = 0; r < count; ++r) {
    if (!storable[r]) continue;
    store_half(scales[r], halves[r]);
    if (halves[r] == 0) {
      std::memset(codes[r], 0, size_t(kVectors) * 8);
      continue;
    }
    const ScaledGrid<3> grid(kE2m1Grid, f16_to_float(halves[r]));
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      const __m512 x = _mm512_loadu_ps(rows + r * kSize + 16 * i);
      const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
      store_nibbles(with_sign(grid.index(_mm512_abs_ps(x)), negative), codes[r] + 8 * i);
    }
  }
}

template <int kVectors>
inline bool store_fp5_of(const float* row, uint8_t* codes, uint8_t* planes) {
  constexpr __mmask16 kCoarse = (1 << kFp5Coarse) - 1;
  const Magnitudes<kVectors> x(row);
  if (!x.finite) return false;
  const uint16_t half = float_to_f16(std::min(x.largest * (1.0f / 7), e5m3(kLargestE5m3)));
  Choice<uint8_t> choice;
  for (int c = 0; c < kCandidates; ++c) {
    const uint8_t byte = uint8_t(std::min(std::max(half >> 7, 1) + kScaleSteps[c], kLargestE5m3));
    choice.scales[c] = half == 0 ? 0 : byte;
    const ScaledGrid<4> grid(kE2m2Grid, e5m3(byte));
    const ScaledGrid<3> coarse(kE2m1Grid, e5m3(byte));
    __m512 errors[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) errors[i] = grid.squared_error(x.at[i]);
    errors[0] = _mm512_mask_mov_ps(errors[0], kCoarse, coarse.squared_error(x.at[0]));
    choice.errors[c] = halving_sum_of<kVectors>(errors);
  }
  const uint8_t best = choice.best();
  if (best == 0) {
    std::memset(codes, 0, size_t(kVectors) * 8);
    std::memset(planes, 0, size_t(kVectors) * 2);
    return true;
  }
  const ScaledGrid<4> grid(kE2m2Grid, e5m3(best));
  const ScaledGrid<3> coarse(kE2m1Grid, e5m3(best));
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    __m512i index = grid.index(x.at[i]);
    if (i == 0) {
      const __m512i doubled = coarse.index(x.at[0]);
      index = _mm512_mask_add_epi32(index, kCoarse, doubled, doubled);
    }
    const uint16_t lowest = _mm512_test_epi32_mask(index, _mm512_set1_epi32(1));
    std::memcpy(planes + 2 * i, &lowest, 2);
    store_nibbles(with_sign(_mm512_srli_epi32(index, 1), x.negative[i]), codes + 8 * i);
  }
  planes[0] = best;
  return true;
}

}  // namespace
}  // namespace octavo
