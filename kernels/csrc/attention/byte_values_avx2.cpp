// Weighted sums over fp4, fp5 and int4 pages by products of bytes (VPMADDUBSW). Softmax weights are
// multiplied by the scale of their V row and become 8-bit fixed point; codes become integers of at most
// kLargestValue. Products are summed exactly in 16-bit lanes over a stretch of 32 positions, then added to
// float accumulators.
//
// Rounding weights preserves their total: each of a vector's eight lanes passes its rounding error on to the
// same lane of the next vector. The largest weight becomes at most 254. The weights of a stretch are limited
// so that their sum times the codes' largest integer fits into 16 bits.
//
// Bytes of two positions alternate, because a 16-bit lane of VPMADDUBSW adds two products:
//
//   A chunk of 64 dims is four vectors. Lane i of vector j is dim 2 b + j % 2, where
//   b = i / 8 * 16 + j / 2 * 8 + i % 8.
#include <algorithm>

#include "attention/bytes_avx2.h"
#include "attention/rows.h"
#include "attention/sides_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kStretch = 32;  // positions whose products are summed in 16-bit lanes
constexpr int kStretches = kTileTokens / kStretch;
constexpr int kPairs = kStretch / 2;

template <class Code>
using Lookup = ByteLookup<Code, 0, 2>;

int value_width(int dim) { return dim; }

// A chunk of a block's 16 rows, read as pairs of rows. Rows have kDim dims, or `any_dim` if kDim is 0.
template <class Code, int kDim>
struct Rows {
  const uint8_t *codes, *planes;
  int64_t plane_stride;
  int any_dim, dim;  // dim: the chunk's first dim

  Rows(const PageLayout& layout, const Tile::Block& block, int dim)
      : codes(v_codes(layout, block.base, block.offset) + dim / 2),
        planes(v_scale(layout, block.base, block.offset)),
        plane_stride(layout.v.scale_bytes),
        any_dim(layout.v.dim),
        dim(dim) {}

  // Expands vectors 2 * half and 2 * half + 1 of the pair.
  __attribute__((always_inline)) void expand(const Lookup<Code>& lookup, int half, __m256i* to) const {
    lookup.expand(
        interleave(load256(codes), load256(codes + stride()), half),
        interleave(plane_bytes<Code>(planes, dim), plane_bytes<Code>(planes + plane_stride, dim), half),
        to[0], to[1]);
  }

  void advance() { codes += 2 * stride(), planes += 2 * plane_stride; }

 private:
  int stride() const { return (kDim > 0 ? kDim : any_dim) / 2; }

  // Interleaves bytes of both vectors, from the lower (half 0) or upper half (half 1) of each 128-bit lane.
  OCTAVO_INLINE __m256i interleave(__m256i first, __m256i second, int half) {
    return half == 0 ? _mm256_unpacklo_epi8(first, second) : _mm256_unpackhi_epi8(first, second);
  }
};

// Operands of the sums over a stretch.
template <class Code>
struct Values {
  const PageLayout& layout;
  const Tile& tile;
  const Lookup<Code>& lookup;
  int stretch;

  const Tile::Block& block(int i) const { return tile.blocks[2 * stretch + i]; }
  // Returns a line to prefetch from the block after block i; each pair and chunk of block i gets one line.
  const uint8_t* ahead(int i, int dim) const {
    const Tile::Block& next =
        tile.next[2 * stretch + i].base != nullptr ? tile.next[2 * stretch + i] : block(i);
    return v_codes(layout, next.base, next.offset) + dim / kChunk * kPairs / 2 * 64;
  }
};

// Adds a row's 16-bit sums to its accumulators: the even lanes of a vector, then the odd ones. Each sum
// becomes the upper half of a 32-bit integer, that is, is multiplied by 2^16, which is exact in floats.
OCTAVO_INLINE void add_sums(__m256i sums, __m256 factor, float* accumulators) {
  const __m256 unit = _mm256_mul_ps(factor, _mm256_set1_ps(0x1p-16f));
  const __m256i even = _mm256_slli_epi32(sums, 16), odd = _mm256_and_si256(sums, _mm256_set1_epi32(-65536));
  _mm256_storeu_ps(accumulators,
                   _mm256_fmadd_ps(_mm256_cvtepi32_ps(even), unit, _mm256_loadu_ps(accumulators)));
  _mm256_storeu_ps(accumulators + 8,
                   _mm256_fmadd_ps(_mm256_cvtepi32_ps(odd), unit, _mm256_loadu_ps(accumulators + 8)));
}

constexpr float kLargestWeight = 254;  // at most 255 with the rounding error that is passed on

// Returns the limit of a stretch's sum of weights; each lane may round up by half a unit, hence the margin.
template <class Code>
constexpr float kLargestSum = float(INT16_MAX / Code::kLargestValue - 4);

// Converts a stretch's weights * scales to bytes; returns the factor that turns sums of products into floats.
template <class Code>
OCTAVO_INLINE float fix_weights(const float* weights, const float* scales, uint32_t* pairs) {
  __m256 scaled[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    scaled[i] = _mm256_mul_ps(_mm256_loadu_ps(weights + 8 * i), _mm256_loadu_ps(scales + 8 * i));
  const float top = octavo::largest_lane(
      (Vec)_mm256_max_ps(_mm256_max_ps(scaled[0], scaled[1]), _mm256_max_ps(scaled[2], scaled[3])));
  const float sum = octavo::sum_lanes(
      (Vec)_mm256_add_ps(_mm256_add_ps(scaled[0], scaled[1]), _mm256_add_ps(scaled[2], scaled[3])));
  const float unit = std::max(top * (1 / kLargestWeight), sum * (1 / kLargestSum<Code>));
  const __m256 to_fixed = _mm256_set1_ps(unit > 1e-33f ? 1 / unit : 0.0f);
  __m256 running = _mm256_setzero_ps();
  __m256i before = _mm256_setzero_si256(), fixed[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    running = _mm256_add_ps(running, _mm256_mul_ps(scaled[i], to_fixed));
    const __m256i rounded = _mm256_cvtps_epi32(running);
    fixed[i] = _mm256_sub_epi32(rounded, before);
    before = rounded;
  }
  const __m256i words[2] = {_mm256_packs_epi32(fixed[0], fixed[1]), _mm256_packs_epi32(fixed[2], fixed[3])};
  // Reorders groups of four positions, which are in the order 0 2 4 6 1 3 5 7 after packing within 128 bits.
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words[0], words[1]),
                                                    _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  const __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(bytes));
  const __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(bytes, 1));
  store256(pairs, _mm256_or_si256(low, _mm256_slli_epi32(low, 16)));
  store256(pairs + 8, _mm256_or_si256(high, _mm256_slli_epi32(high, 16)));
  return unit * (1.0f / Code::kScale);
}

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
    load_scales<Code>(v_scale(layout, block.base, block.offset), layout.v.scale_bytes, tile.mask(b),
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

// Copies a chunk of an accumulator, [4 vectors][even lanes, odd lanes], to the order of dims. In each 128
// bits, lanes 2 i and 2 i + 1 of two vectors hold four consecutive dims.
void to_natural(int dim, const float* accumulator, float* row) {
  for (; dim > 0; dim -= kChunk, row += kChunk)
    for (int half = 0; half < 2; ++half, accumulator += 32) {
      __m256d pairs[4];  // dims 2 i and 2 i + 1 as one lane: 0 2, 4 6, 1 3, 5 7
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        const __m256 first = _mm256_loadu_ps(accumulator + 8 * odd);
        const __m256 second = _mm256_loadu_ps(accumulator + 16 + 8 * odd);
        pairs[2 * odd] = _mm256_castps_pd(_mm256_unpacklo_ps(first, second));
        pairs[2 * odd + 1] = _mm256_castps_pd(_mm256_unpackhi_ps(first, second));
      }
      __m256 four[4];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        four[2 * i] = _mm256_castpd_ps(_mm256_unpacklo_pd(pairs[i], pairs[2 + i]));
        four[2 * i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(pairs[i], pairs[2 + i]));
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        float* const to = row + 16 * half + 8 * i;
        _mm256_storeu_ps(to, _mm256_permute2f128_ps(four[2 * i], four[2 * i + 1], 0x20));
        _mm256_storeu_ps(to + 32, _mm256_permute2f128_ps(four[2 * i], four[2 * i + 1], 0x31));
      }
    }
}

template <class Code>
constexpr ValueSide sides = {value_width, value_panel_bytes, accumulate<Code>, to_natural};

}  // namespace

const ValueSide* byte_values(CodeType codes) {
  return side_of<ValueSide>(codes, [](auto code) { return &sides<decltype(code)>; });
}

}  // namespace octavo::OCTAVO_ISA
