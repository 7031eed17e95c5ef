// Weighted sums over fp4, fp5 and int4 pages by products of bytes (VPMADDUBSW): softmax weights, times the
// scale of their row, become 8-bit fixed point, codes integers of at most kLargestValue, and their products
// are summed exactly in 16-bit lanes over a stretch of 32 positions, then added to float accumulators.
#include "attention/byte_rows_avx2.h"
#include "attention/byte_weights_avx2.h"
#include "attention/rows.h"
#include "attention/sides_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

// The panel of a stretch, then weights and factors.
size_t value_panel_bytes(int dim, int num_rows) {
  return panel_bytes(dim) + size_t(num_rows) * kStretches * (4 * kPairs + 4);
}

struct Weights {
  uint32_t* pairs;  // [rows][stretches][pairs]: two bytes, twice
  float* factors;   // [rows][stretches]

  Weights(void* scratch, int dim, int num_rows)
      : pairs(reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(scratch) + panel_bytes(dim))),
        factors(reinterpret_cast<float*>(pairs + size_t(num_rows) * kTileTokens / 2)) {}
};

// The pairs of a block of two rows each, times the weights of kRows rows, to kRows * kVectors sums.
template <class Code, int kDim, int kRows, int kVectors, bool kExpanded>
OCTAVO_INLINE void add_pairs(const Values<Code>& values, int b, const uint32_t* weights, int dim, int half,
                             const uint8_t* ahead, __m256i (&sums)[kRows * kVectors]) {
  Rows<Code, kDim> rows(values.layout, values.block(b), dim);
  const uint8_t* from = values.expanded(b * kPairs / 2, dim) + half * 64;
#pragma GCC unroll 2
  for (int pair = 0; pair < kPairs / 2; ++pair) {
    if (!kExpanded) __builtin_prefetch(ahead + pair * 64);
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; j += 2) {
      __m256i bytes[2];
      if (kExpanded) bytes[0] = load256(from + 32 * j), bytes[1] = load256(from + 32 * j + 32);
      else rows.expand(values.lookup, half + j / 2, bytes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m256i weight = _mm256_set1_epi32(int32_t(weights[r * (kTileTokens / 2) + pair]));
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) add_products(sums[r * kVectors + j + i], weight, bytes[i]);
      }
    }
    from += 2 * (kDim > 0 ? kDim : values.layout.v.dim);
    rows.advance();
  }
}

// kRows rows, kVectors vectors of the chunk at `dim` (4, or 2: those of `half`).
template <class Code, int kDim, int kRows, int kVectors, bool kExpanded>
OCTAVO_INLINE void accumulate_rows(const Values<Code>& values, const Weights& weights, int first, int dim,
                                   int half, float* accumulators) {
  __m256i sums[kRows * kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows * kVectors; ++i) sums[i] = _mm256_setzero_si256();
  const uint32_t* pairs = weights.pairs + size_t(first) * (kTileTokens / 2) + values.stretch * kPairs;
  for (int b = 0; b < 2; ++b, pairs += kPairs / 2)
    if (values.block(b).base != nullptr)
      add_pairs<Code, kDim, kRows, kVectors, kExpanded>(values, b, pairs, dim, half, values.ahead(b, dim),
                                                        sums);
  const int width = kDim > 0 ? kDim : values.layout.v.dim;
  accumulators += int64_t(first) * width + dim + half * 32;
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const __m256 factor = _mm256_set1_ps(weights.factors[(first + r) * kStretches + values.stretch]);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      add_sums(sums[r * kVectors + j], factor, accumulators + r * width + 16 * j);
  }
}

template <class Code, int kDim, bool kExpanded>
void accumulate_stretch(const Values<Code>& values, const Weights& weights, int num_rows,
                        float* accumulators) {
  const int width = kDim > 0 ? kDim : values.layout.v.dim;
  for (int dim = 0; dim < width; dim += kChunk) {
    int row = 0;
    for (; row + 4 <= num_rows; row += 4)
      for (int half = 0; half < 2; ++half)
        accumulate_rows<Code, kDim, 4, 2, kExpanded>(values, weights, row, dim, half, accumulators);
    for (; row + 2 <= num_rows; row += 2)
      accumulate_rows<Code, kDim, 2, 4, kExpanded>(values, weights, row, dim, 0, accumulators);
    if (row < num_rows)
      accumulate_rows<Code, kDim, 1, 4, kExpanded>(values, weights, row, dim, 0, accumulators);
  }
}

// The tile's weights, times their rows' scales, in fixed point: all at once, because one alone is a long
// chain of operations.
template <class Code>
void fix_tile(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows,
              const Weights& fixed) {
  float scales[kBlocks][16] = {};  // zeros where rows are not seen
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

template <class Code, int kDim>
void accumulate_dims(const PageLayout& layout, const Tile& tile, const Weights& weights, int num_rows,
                     uint8_t* panel, float* accumulators) {
  const Lookup<Code> lookup;
  Values<Code> values{layout, tile, lookup, panel, 0};
  for (int stretch = 0; stretch < kStretches; ++stretch) {
    values.stretch = stretch;
    for (int b = 2 * stretch; b < 2 * stretch + 2; ++b) {
      const Tile::Block& next = tile.next[b];
      if (next.base != nullptr) prefetch(v_scale(layout, next.base, next.offset), 16 * layout.v.scale_bytes);
    }
    if (tile.mask(2 * stretch) == 0 && tile.mask(2 * stretch + 1) == 0) continue;
    if (num_rows <= kDirectRows) {
      accumulate_stretch<Code, kDim, false>(values, weights, num_rows, accumulators);
      continue;
    }
    expand_stretch(values);
    accumulate_stretch<Code, kDim, true>(values, weights, num_rows, accumulators);
  }
}

template <class Code>
void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  const int dim = layout.v.dim;
  const Weights fixed(scratch, dim, num_rows);
  fix_tile<Code>(layout, tile, weights, num_rows, fixed);
  const auto run = dim == 64    ? accumulate_dims<Code, 64>
                   : dim == 128 ? accumulate_dims<Code, 128>
                                : accumulate_dims<Code, 0>;
  run(layout, tile, fixed, num_rows, static_cast<uint8_t*>(scratch), accumulators);
}

template <class Code>
constexpr ValueSide sides = {value_width, value_panel_bytes, accumulate<Code>, to_natural};

}  // namespace

const ValueSide* byte_values(CodeType codes) {
  return side_of<ValueSide>(codes, [](auto code) { return &sides<decltype(code)>; });
}

}  // namespace octavo::OCTAVO_ISA
