// A few rows over pages that become bf16 on their way to AMX tiles (decoded_tiles_avx512.cpp): what tiles
// would do with the same numbers, by FMAs on codes as they are read. A tile adds up the products of first
// numbers of pairs, and of second ones, each in turn; both sums are added, and then to what was there (Intel
// SDM, TDPBF16PS). Products are exact, so a value may be its code's times its scale.
#pragma once

#include <algorithm>

#include "attention/ahead.h"
#include "attention/codes_avx512.h"
#include "attention/rows.h"
#include "attention/sides_avx512.h"
#include "pages/codes.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kDirectRows = 4;   // up to so many rows go without a panel
constexpr int kStepValues = 32;  // dims that a tile multiplies, those of a vector of bf16

// 16 bytes as words of 32 bits.
OCTAVO_INLINE __m512i load_words(const uint8_t* from) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// The scales of a block's groups, row by row; zeros in rows that nobody sees. Scales of E8M0 below 2^-126
// are taken for that: tiles see nothing smaller.
template <class Code>
struct RowScales {
  alignas(64) float numbers[16 * kMaxDim / Code::kGroup];

  void load(const uint8_t* from, int dim, uint32_t visible) {
    const int in_row = dim / Code::kGroup;
    for (int i = 0; i < 16 * in_row; i += 16) {
      __m512 loaded;
      if constexpr (Code::kGroup == kMxGroup) {
        const __m512i byte = _mm512_max_epi32(load_words(from + i), _mm512_set1_epi32(1));
        loaded = _mm512_castsi512_ps(_mm512_slli_epi32(byte, 23));
      } else {
        loaded = e4m3_floats(load_words(from + i));
      }
      _mm512_store_ps(numbers + i, loaded);
    }
    for (int t = 0; visible != 0xffff && t < 16; ++t)
      if (!(visible >> t & 1)) std::fill_n(numbers + t * in_row, in_row, 0.0f);
  }
};

// 32 dims of one position, even ones and odd ones, of E2M1; `numbers` of its row.
template <class Code>
OCTAVO_INLINE void load_dims(const uint8_t* codes, const float* numbers, int vector, __m512& even,
                             __m512& odd) {
  const __m512i low = load_words(codes + 16 * vector), high = _mm512_srli_epi32(low, 4);
  __m512 table = _mm512_loadu_ps(kE2M1);
  if constexpr (Code::kGroup == kMxGroup) table = _mm512_mul_ps(table, _mm512_set1_ps(numbers[vector]));
  even = _mm512_permutexvar_ps(low, table);
  odd = _mm512_permutexvar_ps(high, table);
  if constexpr (Code::kGroup == kNvGroup) {
    const __m512 scales = _mm512_mask_mov_ps(_mm512_set1_ps(numbers[2 * vector]), 0xff00,
                                             _mm512_set1_ps(numbers[2 * vector + 1]));
    even = _mm512_mul_ps(even, scales);
    odd = _mm512_mul_ps(odd, scales);
  }
}

// accumulators[row][width] += weights[row][64] * values, kParts times 32 dims at a time: 16 even dims, then
// 16 odd ones.
template <class Code, int kRows, int kParts>
void accumulate_codes(const PageLayout& layout, const Tile& tile, const float* weights, int width,
                      float* accumulators) {
  const int dim = layout.v.dim, in_row = dim / Code::kGroup;
  RowScales<Code> scales[kBlocks];
  for (int b = 0; b < kBlocks; ++b)
    if (const auto [base, offset] = tile.blocks[b]; base != nullptr)
      scales[b].load(v_scale(layout, base, offset), dim, tile.mask(b));
  const FlushedToZero flushed;
  for (int part = 0; part < dim / kStepValues; part += kParts, accumulators += kParts * kStepValues) {
    for (int half = 0; half < 2; ++half) {
      __m512 sums[2][kRows][2 * kParts];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < 2 * kParts; ++v) sums[0][r][v] = sums[1][r][v] = _mm512_setzero_ps();
      bool any = false;
      for (int b = 2 * half; b < 2 * half + 2; ++b) {
        const auto [base, offset] = tile.blocks[b];
        if (base == nullptr) continue;
        any = true;
        const Ahead ahead(layout, tile, 3 * kBlocks + b);
        const uint8_t* codes = v_codes(layout, base, offset);
        const float* numbers = scales[b].numbers;
        for (int t = 0; t < 16; t += 2) {
          if (part == 0) Ahead::prefetch_part(ahead, t / 2, 8);
#pragma GCC unroll 2
          for (int i = 0; i < 2; ++i, codes += layout.v.row_bytes, numbers += in_row) {
#pragma GCC unroll 4
            for (int p = 0; p < kParts; ++p) {
              __m512 even, odd;
              load_dims<Code>(codes, numbers, part + p, even, odd);
#pragma GCC unroll 4
              for (int r = 0; r < kRows; ++r) {
                const __m512 weight = _mm512_set1_ps(weights[r * kTileTokens + 16 * b + t + i]);
                sums[i][r][2 * p] = _mm512_fmadd_ps(weight, even, sums[i][r][2 * p]);
                sums[i][r][2 * p + 1] = _mm512_fmadd_ps(weight, odd, sums[i][r][2 * p + 1]);
              }
            }
          }
        }
      }
      if (!any) continue;
      add_pairs(sums, width, accumulators);
    }
  }
}

// scores[row][64] of kRows rows of queries, [row][dim] floats of which bf16 holds all. Powers of two as
// scales are left to the end of a step, which is a group: no rounding depends on them.
template <class Code, int kRows>
void score_codes(const PageLayout& layout, const Tile& tile, const float* queries, float* scores) {
  static_assert(Code::kGroup == kStepValues);
  const RowFormat& format = layout.k;
  const int dim = format.dim, num_words = dim / 8, groups = dim / Code::kGroup;
  __m512 scales[kMaxDim / Code::kGroup];
  const __m512 table = _mm512_loadu_ps(kE2M1);
  for (int b = 0; b < kBlocks; ++b) {
    const auto [base, offset] = tile.blocks[b];
    if (base == nullptr) continue;
    const uint8_t* const codes = k_codes(layout, base, offset);
    const Ahead ahead(layout, tile, b + 2 * kBlocks);
    if (const Tile::Block& next = tile.next[b]; next.base != nullptr)
      prefetch(k_scale(layout, next.base, next.offset), 16 * format.scale_bytes);
    load_group_scales<Code>(k_scale(layout, base, offset), format.scale_bytes, groups, 0xffff, scales, 1);
    const FlushedToZero flushed;
    __m512 totals[kRows], sums[2][kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) totals[r] = sums[0][r] = sums[1][r] = _mm512_setzero_ps();
    for (int word = 0; word < num_words; word += 16) {
      const __mmask16 valid = __mmask16((1u << std::min(16, num_words - word)) - 1);
      __m512i columns[16];
#pragma GCC unroll 16
      for (int t = 0; t < 16; ++t)
        columns[t] = _mm512_maskz_loadu_epi32(valid, codes + t * format.row_bytes + 4 * word);
      transpose16(columns);
      const float* from = queries + 8 * word;
      const __m512* scale = scales + 8 * word / Code::kGroup;
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i, from += 8) {
        if (word + i >= num_words) break;
        ahead.prefetch_line(word + i);  // as many words as lines
        const __m512* const of_group = scale + 8 * i / Code::kGroup;
#pragma GCC unroll 8
        for (int d = 0; d < 8; ++d) {
          const __m512 key =
              _mm512_permutexvar_ps(d == 0 ? columns[i] : _mm512_srli_epi32(columns[i], 4 * d), table);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r)
            sums[d % 2][r] = _mm512_fmadd_ps(_mm512_set1_ps(from[r * dim + d]), key, sums[d % 2][r]);
        }
        if (i % 4 != 3) continue;  // 32 dims
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const __m512 sum = _mm512_add_ps(sums[0][r], sums[1][r]);
          totals[r] =
              _mm512_fmadd_ps(sum, _mm512_mul_ps(*of_group, _mm512_set1_ps(float(Code::kScale))), totals[r]);
          sums[0][r] = sums[1][r] = _mm512_setzero_ps();
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(scores + r * kTileTokens + 16 * b, totals[r]);
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
