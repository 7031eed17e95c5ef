// Weighted sums over fp4, fp5 and int4 pages by products of bytes (VPMADDUBSW). Softmax weights are
// multiplied by the scale of their V row and become 8-bit fixed point; codes become integers of at most
// kLargestValue. Products are summed exactly in 16-bit lanes over a stretch of 32 positions, then added to
// float accumulators.
#include "attention/byte_rows_avx2.h"
#include "attention/byte_weights_avx2.h"
#include "attention/rows.h"
#include "attention/sides_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Returns the size of a tile's weights and factors.
size_t value_panel_bytes(int, int num_rows) { return size_t(num_rows) * kStretches * (4 * kPairs + 4); }

struct Weights {
  uint32_t* pairs;  // [rows][stretches][pairs]: weights of two positions, repeated
  float* factors;   // [rows][stretches]

  Weights(void* scratch, int num_rows)
      : pairs(static_cast<uint32_t*>(scratch)),
        factors(reinterpret_cast<float*>(pairs + size_t(num_rows) * kTileTokens / 2)) {}

  __attribute__((always_inline)) __m256i pair(int row, int stretch, int pair) const {
    return _mm256_set1_epi32(int32_t(pairs[row * (kTileTokens / 2) + stretch * kPairs + pair]));
  }
  __attribute__((always_inline)) __m256 factor(int row, int stretch) const {
    return _mm256_set1_ps(factors[row * kStretches + stretch]);
  }
};

// Converts the tile's weights, times their rows' scales, to fixed point. All rows are converted together,
// because one row alone is a long chain of dependent operations.
template <class Code>
void fix_tile(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows,
              const Weights& fixed) {
  float scales[kBlocks][16] = {};  // stay 0 for invisible rows
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    if (block.base == nullptr) continue;
    Code::load_scales(v_scale(layout, block.base, block.offset), layout.v.scale_bytes, tile.mask(b),
                      scales[b]);
  }
  for (int i = 0; i < num_rows * kStretches; ++i)
    fixed.factors[i] =
        fix_weights<Code>(weights + i * kStretch, scales[i % kStretches * 2], fixed.pairs + i * kPairs);
}

// Adds products of kRows rows and kVectors vectors of the chunk at `dim`: all 4 vectors, or the 2 of `half`.
template <class Code, int kDim, int kRows, int kVectors>
OCTAVO_INLINE void accumulate_rows(const Values<Code>& values, const Weights& weights, int first, int dim,
                                   int half, float* accumulators) {
  __m256i sums[kRows * kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows * kVectors; ++i) sums[i] = _mm256_setzero_si256();
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
          const __m256i weight = weights.pair(first + r, values.stretch, b * kPairs / 2 + pair);
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
      add_sums(sums[r * kVectors + j], weights.factor(first + r, values.stretch),
               accumulators + r * width + 16 * j);
}

// Computes rows [row, row + kRows) over both stretches of the tile.
template <class Code, int kDim, int kRows>
OCTAVO_INLINE void accumulate_block(Values<Code>& values, const Weights& weights, int row,
                                    float* accumulators) {
  const int width = kDim > 0 ? kDim : values.layout.v.dim;
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

template <class Code, int kDim>
void accumulate_dims(const PageLayout& layout, const Tile& tile, const Weights& weights, int num_rows,
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
template <class Code>
void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  const Weights fixed(scratch, num_rows);
  fix_tile<Code>(layout, tile, weights, num_rows, fixed);
  const int dim = layout.v.dim;
  const auto run = dim == 64    ? accumulate_dims<Code, 64>
                   : dim == 128 ? accumulate_dims<Code, 128>
                                : accumulate_dims<Code, 0>;
  run(layout, tile, fixed, num_rows, accumulators);
}

template <class Code>
constexpr ValueSide sides = {value_width, value_panel_bytes, accumulate<Code>, to_natural};

}  // namespace

const ValueSide* byte_values(CodeType codes) {
  return side_of<ValueSide>(codes, [](auto code) { return &sides<decltype(code)>; });
}

}  // namespace octavo::OCTAVO_ISA
