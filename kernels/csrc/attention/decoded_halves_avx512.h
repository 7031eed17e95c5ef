// A few rows over fp16 pages, as decoded_rows_avx512.h: what tiles do with upper and lower parts of numbers.
#pragma once

#include "attention/ahead.h"
#include "attention/codes_avx512.h"
#include "attention/rows.h"
#include "attention/sides_avx512.h"

namespace octavo::OCTAVO_ISA {
namespace {

// The first eight bits of each, which bf16 holds. What is left has three.
OCTAVO_INLINE __m512 upper_part(__m512 values) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(int32_t(0xffff0000))));
}

// accumulators[row][width] += weights[row][64] * values, of each half of the tile upper parts first; kVectors
// times 16 dims at a time.
template <int kRows, int kVectors>
void accumulate_halves(const PageLayout& layout, const Tile& tile, const float* weights, int width,
                       bool first, float* accumulators) {
  const int dim = layout.v.dim;
  const FlushedToZero flushed;
  for (int d = 0; d < dim; d += 16 * kVectors, accumulators += 16 * kVectors) {
    for (int half = 0; half < 2; ++half) {
      __m512 sums[2][2][kRows][kVectors];  // of upper and lower parts
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part)
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sums[0][part][r][v] = sums[1][part][r][v] = _mm512_setzero_ps();
      bool any = false;
      for (int b = 2 * half; b < 2 * half + 2; ++b) {
        const auto [base, offset] = tile.blocks[b];
        if (base == nullptr) continue;
        any = true;
        const Ahead ahead(layout, tile, kBlocks + b, 2);  // a tile of these fills the first-level cache
        const uint8_t* from = v_codes(layout, base, offset) + 2 * int64_t(d);
        const uint32_t visible = tile.mask(b);
        for (int t = 0; t < 16; t += 2) {
          if (first && d == 0) Ahead::prefetch_part(ahead, t / 2, 8);
#pragma GCC unroll 2
          for (int i = 0; i < 2; ++i, from += layout.v.row_bytes) {
            const __mmask16 valid = visible >> (t + i) & 1 ? 0xffff : 0;
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
              const __m512 all = halves(from + 32 * v, valid), upper = upper_part(all);
              const __m512 lower = _mm512_sub_ps(all, upper);
#pragma GCC unroll 2
              for (int r = 0; r < kRows; ++r) {
                const __m512 weight = _mm512_set1_ps(weights[r * kTileTokens + 16 * b + t + i]);
                sums[i][0][r][v] = _mm512_fmadd_ps(weight, upper, sums[i][0][r][v]);
                sums[i][1][r][v] = _mm512_fmadd_ps(weight, lower, sums[i][1][r][v]);
              }
            }
          }
        }
      }
      if (!any) continue;
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          float* const to = accumulators + r * width + 16 * v;
          __m512 total = _mm512_loadu_ps(to);
#pragma GCC unroll 2
          for (int part = 0; part < 2; ++part)
            total = _mm512_add_ps(total, _mm512_add_ps(sums[0][part][r][v], sums[1][part][r][v]));
          _mm512_storeu_ps(to, total);
        }
    }
  }
}

// scores[row][64] of kRows rows of queries, [row][dim] floats of which bf16 holds all.
template <int kRows>
void score_halves(const PageLayout& layout, const Tile& tile, const float* queries, float* scores) {
  const RowFormat& format = layout.k;
  const int dim = format.dim;
  const FlushedToZero flushed;
  for (int b = 0; b < kBlocks; ++b) {
    const auto [base, offset] = tile.blocks[b];
    if (base == nullptr) continue;
    const uint8_t* const from = k_codes(layout, base, offset);
    const Ahead ahead(layout, tile, b, 2);
    __m512 totals[kRows], sums[2][kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) totals[r] = sums[0][r] = sums[1][r] = _mm512_setzero_ps();
    const float* of_dims = queries;
    for (int d = 0; d < dim; d += 32, of_dims += 32) {
      __m512i columns[16];  // of two dims each
#pragma GCC unroll 16
      for (int t = 0; t < 16; ++t)
        columns[t] = _mm512_loadu_si512(from + t * format.row_bytes + 2 * int64_t(d));
      transpose16(columns);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        ahead.prefetch_line(d / 2 + i);  // as many pairs of dims as lines
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const __m512 all = half_of(columns[i], half), upper = upper_part(all);
          const __m512 lower = _mm512_sub_ps(all, upper);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const __m512 query = _mm512_set1_ps(of_dims[r * dim + 2 * i + half]);
            sums[0][r] = _mm512_fmadd_ps(query, upper, sums[0][r]);
            sums[1][r] = _mm512_fmadd_ps(query, lower, sums[1][r]);
          }
        }
        if (i % 8 != 7) continue;  // 16 dims, in two parts each
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          totals[r] = _mm512_add_ps(totals[r], _mm512_add_ps(sums[0][r], sums[1][r]));
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
