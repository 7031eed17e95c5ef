// Loops of value sides that multiply bytes on AVX2 (VPMADDUBSW). The loops decide which stretches, chunks and
// rows are summed together.
//
// A side's class `Weights` has a tile's weights in fixed point. `fix<kRows>(row)` converts the weights of
// some rows just before their use, so that they are still in L1. `Weights::Rows` has the weights of a few
// rows for a stretch and a chunk:
//
//   __m256i pair(row, pair, vector): weights of two positions, for vectors `vector` and `vector` + 1
//   void add(sums, row, vector, accumulators): scales the sums of a vector and adds them to accumulators
#pragma once

#include "attention/byte_rows_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Adds products of kRows rows and kVectors vectors of the chunk at `dim`: all 4 vectors, or the 2 of `half`.
template <class Code, int kDim, int kRows, int kVectors, class Weights>
OCTAVO_INLINE void accumulate_rows(const Values<Code>& values, const Weights& weights, int first, int dim,
                                   int half, float* accumulators) {
  __m256i sums[kRows * kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows * kVectors; ++i) sums[i] = _mm256_setzero_si256();
  const typename Weights::Rows of_rows(weights, first, values.stretch, dim, half);
  for (int b = 0; b < 2; ++b) {
    if (values.block(b).base == nullptr) continue;
    Rows<Code, kDim> rows(values.layout, values.block(b), dim);
    const uint8_t* const ahead = values.ahead(b, dim);
#pragma GCC unroll 2
    for (int pair = 0; pair < kPairs / 2; ++pair) {
      __builtin_prefetch(ahead + pair * 64);
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; j += 2) {
        __m256i bytes[2];
        rows.expand(values.lookup, half + j / 2, bytes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const __m256i weight = of_rows.pair(r, b * kPairs / 2 + pair, j);
#pragma GCC unroll 2
          for (int i = 0; i < 2; ++i) add_products(sums[r * kVectors + j + i], weight, bytes[i]);
        }
      }
      rows.advance();
    }
  }
  const int width = kDim > 0 ? kDim : values.layout.v.dim;
  accumulators += int64_t(first) * width + dim + half * 32;
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      of_rows.add(sums[r * kVectors + j], r, j, accumulators + r * width + 16 * j);
}

// Computes rows [row, row + kRows) over both stretches of the tile.
template <class Code, int kDim, int kRows, class Weights>
OCTAVO_INLINE void accumulate_block(Values<Code>& values, Weights& weights, int row, float* accumulators) {
  const int width = kDim > 0 ? kDim : values.layout.v.dim;
  weights.template fix<kRows>(row);
  for (int stretch = 0; stretch < kStretches; ++stretch) {
    if (values.tile.mask(2 * stretch) == 0 && values.tile.mask(2 * stretch + 1) == 0) continue;
    values.stretch = stretch;
    for (int dim = 0; dim < width; dim += kChunk)
      if constexpr (kRows == 4)
        for (int half = 0; half < 2; ++half)
          accumulate_rows<Code, kDim, 4, 2>(values, weights, row, dim, half, accumulators);
      else accumulate_rows<Code, kDim, kRows, 4>(values, weights, row, dim, 0, accumulators);
  }
}

template <class Code, int kDim, class Weights>
void accumulate_dims(const PageLayout& layout, const Tile& tile, Weights& weights, int num_rows,
                     float* accumulators) {
  const Lookup<Code> lookup;
  Values<Code> values{layout, tile, lookup, 0};
  for (const Tile::Block& next : tile.next)
    if (next.base != nullptr) prefetch(v_scale(layout, next.base, next.offset), 16 * layout.v.scale_bytes);
  for_rows(num_rows, [&](int row, auto rows) {
    accumulate_block<Code, kDim, rows()>(values, weights, row, accumulators);
  });
}

// Adds the tile's values times weights[row] to accumulators[row].
template <class Code, class Weights>
void accumulate_tile(const PageLayout& layout, const Tile& tile, Weights& weights, int num_rows,
                     float* accumulators) {
  const int dim = layout.v.dim;
  const auto run = dim == 64    ? accumulate_dims<Code, 64, Weights>
                   : dim == 128 ? accumulate_dims<Code, 128, Weights>
                                : accumulate_dims<Code, 0, Weights>;
  run(layout, tile, weights, num_rows, accumulators);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
