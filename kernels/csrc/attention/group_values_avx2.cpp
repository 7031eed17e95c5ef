// Weighted sums over mxfp4, nvfp4 and affine4 pages by products of bytes (VPMADDUBSW): softmax weights, times
// the scale of their row and group, become 8-bit fixed point, codes integers of at most kLargestValue, and
// their products are summed exactly in 16-bit lanes over a stretch of 32 positions, then added to float
// accumulators. Of affine4, whose codes are unsigned, weights are signed, as its scales are, and have one bit
// less; its biases are summed as floats.
//
// Weights are rounded so that no mass is lost, as in byte_weights_avx2.h, but eight columns at a time: a
// column is a stretch and a group, and hands the rounding error of each position on to the next.
#include <algorithm>
#include <cstring>

#include "attention/byte_rows_avx2.h"
#include "attention/byte_sums_avx2.h"
#include "attention/byte_weights_avx2.h"
#include "attention/group_codes_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kLanes8 = 8;
constexpr int kMaxColumns = kStretches * kMaxDim / kNvGroup;

// Groups of a chunk lie in the order in which the halves of 128 bits of its vectors need them
// (`Code::row_scales`).
template <class Code>
OCTAVO_INLINE int num_columns(int dim) {
  const int used = kStretches * (dim / kChunk) * Code::kSlots;
  return (used + kLanes8 - 1) / kLanes8 * kLanes8;
}

// Of the column (of two columns, whose groups the lower and the upper 128 bits belong to).
template <class Code>
OCTAVO_INLINE __m256i spread_pair(const uint16_t* weights) {
  if constexpr (Code::kSlots == 1) return _mm256_set1_epi16(int16_t(*weights));
  int32_t two;
  std::memcpy(&two, weights, 4);
  const __m256i halves = _mm256_setr_epi32(0x01000100, 0x01000100, 0x01000100, 0x01000100, 0x03020302,
                                           0x03020302, 0x03020302, 0x03020302);
  return _mm256_shuffle_epi8(_mm256_set1_epi32(two), halves);
}
template <class Code>
OCTAVO_INLINE __m256 spread_units(const float* units) {
  if constexpr (Code::kSlots == 1) return _mm256_set1_ps(*units);
  return _mm256_setr_m128(_mm_set1_ps(units[0]), _mm_set1_ps(units[1]));
}

// A row's fixed weights: [columns / 8][pairs][8] of two bytes each; a unit and a sum of biases per column.
template <class Code>
struct Weights {
  int dim, columns;
  uint16_t* pairs;
  float *units, *biases;

  Weights(void* scratch, int dim, int num_rows)
      : dim(dim),
        columns(num_columns<Code>(dim)),
        pairs(reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(scratch) + panel_bytes(dim))),
        units(reinterpret_cast<float*>(pairs + size_t(num_rows) * columns * kPairs)),
        biases(units + size_t(num_rows) * columns) {}

  int column(int stretch, int slot) const { return stretch * (dim / kChunk) * Code::kSlots + slot; }
  size_t row_pairs() const { return size_t(columns) * kPairs; }
  const uint16_t* of(int row, int column) const {
    return pairs + row * row_pairs() + column / kLanes8 * kLanes8 * kPairs + column % kLanes8;
  }

  class Rows {
   public:
    Rows(const Weights& weights, int first, int stretch, int dim, int half)
        : row_pairs_(weights.row_pairs()), columns_(weights.columns) {
      // The first of the columns of vectors 2 * half and 2 * half + 1.
      const int slot = dim / kChunk * Code::kSlots + (Code::kSlots == 4 ? 2 * half : 0);
      const int column = weights.column(stretch, slot);
      const size_t at = size_t(first) * columns_ + column;
      pairs_ = weights.of(first, column);
      units_ = weights.units + at;
      biases_ = weights.biases + at;
    }

    __attribute__((always_inline)) __m256i pair(int row, int pair, int vector) const {
      return spread_pair<Code>(pairs_ + row * row_pairs_ + pair * kLanes8 + vector / 2 * kStep);
    }
    __attribute__((always_inline)) void add(__m256i sums, int row, int vector, float* accumulators) const {
      if constexpr (Code::kBias) {
        const __m256 bias = _mm256_set1_ps(biases_[row * columns_]);
        _mm256_storeu_ps(accumulators, _mm256_add_ps(_mm256_loadu_ps(accumulators), bias));
        _mm256_storeu_ps(accumulators + 8, _mm256_add_ps(_mm256_loadu_ps(accumulators + 8), bias));
      }
      add_sums(sums, spread_units<Code>(units_ + row * columns_ + vector / 2 * kStep), accumulators);
    }

   private:
    static constexpr int kStep = Code::kSlots == 4 ? 2 : 0;  // columns from one half to the next
    const uint16_t* pairs_;
    const float *units_, *biases_;
    size_t row_pairs_;
    int columns_;
  };
};

template <class Code>
size_t value_panel_bytes(int dim, int num_rows) {
  return panel_bytes(dim) + size_t(num_rows) * num_columns<Code>(dim) * (2 * kPairs + 8);
}

// Scales of the tile's rows by position of a stretch and column; zeros where rows are not seen.
template <class Code>
struct Scales {
  alignas(32) float scales[kStretch * kMaxColumns];
  alignas(32) float biases[Code::kBias ? kStretch * kMaxColumns : 8];

  Scales(const PageLayout& layout, const Tile& tile, const Weights<Code>& to) {
    const int columns = to.columns, chunks = layout.v.dim / kChunk, used = kStretches * chunks * Code::kSlots;
    if (~tile.bits != 0 || used < columns) {
      std::fill(scales, scales + kStretch * columns, 0.0f);
      if constexpr (Code::kBias) std::fill(biases, biases + kStretch * columns, 0.0f);
    }
    for (int b = 0; b < kBlocks; ++b) {
      const Tile::Block& block = tile.blocks[b];
      if (block.base == nullptr) continue;
      const uint8_t* from = v_scale(layout, block.base, block.offset);
      for (int t = 0; t < 16; ++t, from += layout.v.scale_bytes) {
        if (!(tile.mask(b) >> t & 1)) continue;
        const int at = (b % 2 * 16 + t) * columns + to.column(b / 2, 0);
        Code::row_scales(from, chunks, scales + at, biases + (Code::kBias ? at : 0));
      }
    }
  }
};

// What rounding hands on may add one to each weight; signed ones then add up to as much in every stretch.
template <class Code>
constexpr float kLargestFixed = Code::kUnsigned ? 126 : kLargestWeight;
template <class Code>
constexpr float kLargestTotal =
    Code::kUnsigned ? float(INT16_MAX / Code::kLargestValue - kStretch) : kLargestSum<Code>;

// Eight columns of a row's weights in fixed point; kBoth: some are of the second stretch.
template <class Code, bool kBoth>
void fix_columns(const float* weights, const Scales<Code>& scales, int row, int first,
                 const Weights<Code>& to) {
  const int of_second = to.column(1, 0) - first;  // the first lane of the second stretch
  if (!kBoth && of_second <= 0) weights += kStretch;
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 second = _mm256_castsi256_ps(_mm256_cmpgt_epi32(lanes, _mm256_set1_epi32(of_second - 1)));
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 scaled[kStretch], top = _mm256_setzero_ps(), sum = top, bias = top;
#pragma GCC unroll 2
  for (int i = 0; i < kStretch; ++i) {
    __m256 weight = _mm256_set1_ps(weights[i]);
    if constexpr (kBoth) weight = _mm256_blendv_ps(weight, _mm256_set1_ps(weights[kStretch + i]), second);
    scaled[i] = _mm256_mul_ps(weight, _mm256_load_ps(scales.scales + i * to.columns + first));
    const __m256 magnitude = Code::kUnsigned ? _mm256_andnot_ps(sign, scaled[i]) : scaled[i];
    top = _mm256_max_ps(top, magnitude);
    sum = _mm256_add_ps(sum, magnitude);
    if constexpr (Code::kBias)
      bias = _mm256_fmadd_ps(weight, _mm256_load_ps(scales.biases + i * to.columns + first), bias);
  }
  const __m256 unit = _mm256_max_ps(_mm256_mul_ps(top, _mm256_set1_ps(1 / kLargestFixed<Code>)),
                                    _mm256_mul_ps(sum, _mm256_set1_ps(1 / kLargestTotal<Code>)));
  const __m256 to_fixed = _mm256_and_ps(_mm256_div_ps(_mm256_set1_ps(1), unit),
                                        _mm256_cmp_ps(unit, _mm256_set1_ps(1e-33f), _CMP_GT_OQ));
  uint16_t* const pairs = to.pairs + row * to.row_pairs() + first * kPairs;
  const __m256i byte = _mm256_set1_epi32(0xff), word = _mm256_set1_epi32(0xffff);
  __m256 running = _mm256_setzero_ps();
  __m256i before = _mm256_setzero_si256();
  for (int pair = 0; pair < kPairs; pair += 2) {
    __m256i fixed[4], two[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      running = _mm256_add_ps(running, _mm256_mul_ps(scaled[2 * pair + i], to_fixed));
      const __m256i rounded = _mm256_cvtps_epi32(running);
      fixed[i] = _mm256_sub_epi32(rounded, before);
      before = rounded;
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m256i low = Code::kUnsigned ? _mm256_and_si256(fixed[2 * i], byte) : fixed[2 * i];
      two[i] = _mm256_or_si256(low, _mm256_slli_epi32(fixed[2 * i + 1], 8));
      if constexpr (Code::kUnsigned) two[i] = _mm256_and_si256(two[i], word);
    }
    store256(pairs + pair * kLanes8, _mm256_permute4x64_epi64(_mm256_packus_epi32(two[0], two[1]), 0xd8));
  }
  const size_t at = size_t(row) * to.columns + first;
  _mm256_storeu_ps(to.units + at, _mm256_mul_ps(unit, _mm256_set1_ps(1.0f / Code::kScale)));
  if constexpr (Code::kBias) _mm256_storeu_ps(to.biases + at, bias);
}

template <class Code>
void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  const Weights<Code> fixed(scratch, layout.v.dim, num_rows);
  const Scales<Code> scales(layout, tile, fixed);
  for (int row = 0; row < num_rows; ++row)
    for (int first = 0; first < fixed.columns; first += kLanes8) {
      const int second = fixed.column(1, 0);
      const bool both = first < second && first + kLanes8 > second;
      const auto fix = both ? fix_columns<Code, true> : fix_columns<Code, false>;
      fix(weights + row * kTileTokens, scales, row, first, fixed);
    }
  accumulate_tile<Code>(layout, tile, fixed, num_rows, scratch, accumulators);
}

template <class Code>
constexpr ValueSide sides = {value_width, value_panel_bytes<Code>, accumulate<Code>, to_natural};

}  // namespace

const ValueSide* group_values(CodeType codes) {
  return group_side_of<ValueSide>(codes, [](auto code) { return &sides<decltype(code)>; });
}

}  // namespace octavo::OCTAVO_ISA
