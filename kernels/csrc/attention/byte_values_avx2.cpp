// Weighted sums over fp4, fp5 and int4 pages by products of bytes (VPMADDUBSW). Softmax weights are
// multiplied by the scale of their V row and become 8-bit fixed point; codes become integers of at most
// kLargestValue. Products are summed exactly in 16-bit lanes over a stretch of 32 positions, then added to
// float accumulators.
#include "attention/byte_rows_avx2.h"
#include "attention/byte_sums_avx2.h"
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

  template <int>
  void fix(int) {}  // nothing to do, because fix_tile has done all rows

  class Rows {
   public:
    Rows(const Weights& weights, int first, int stretch, int, int)
        : pairs_(weights.pairs + size_t(first) * (kTileTokens / 2) + stretch * kPairs),
          factors_(weights.factors + first * kStretches + stretch) {}

    __attribute__((always_inline)) __m256i pair(int row, int pair, int) const {
      return _mm256_set1_epi32(int32_t(pairs_[row * (kTileTokens / 2) + pair]));
    }
    __attribute__((always_inline)) void add(__m256i sums, int row, int, float* accumulators) const {
      add_sums(sums, _mm256_set1_ps(factors_[row * kStretches]), accumulators);
    }

   private:
    const uint32_t* pairs_;
    const float* factors_;
  };
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

template <class Code>
void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  Weights fixed(scratch, num_rows);
  fix_tile<Code>(layout, tile, weights, num_rows, fixed);
  accumulate_tile<Code>(layout, tile, fixed, num_rows, accumulators);
}

template <class Code>
constexpr ValueSide sides = {value_width, value_panel_bytes, accumulate<Code>, to_natural<Code>};

}  // namespace

const ValueSide* byte_values(CodeType codes) {
  return side_of<ValueSide>(codes, [](auto code) { return &sides<decltype(code)>; });
}

}  // namespace octavo::OCTAVO_ISA
