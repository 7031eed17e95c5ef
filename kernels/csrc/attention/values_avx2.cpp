// Weighted sums over pages of codes by integer products. Softmax weights are multiplied by the scale of their
// V row and become fixed point, codes become integers. Products are summed exactly over a stretch of
// positions, then added to float accumulators. Vectors hold two positions alternately, because an instruction
// adds two products.
//
// fp4, fp5 and int4: 8-bit weights, products of bytes (VPMADDUBSW), summed in 16-bit lanes over a stretch of
// 32 positions. Rounding weights preserves their total: each of a vector's eight lanes passes its rounding
// error on to the same lane of the next vector. The largest weight becomes at most 254. The weights of a
// stretch are limited so that their sum times the codes' largest integer fits into 16 bits.
//
//   A part of 64 dims is four vectors. Lane i of vector j is dim 2 b + j % 2, where
//   b = i / 8 * 16 + j / 2 * 8 + i % 8.
//
// int8: 15-bit weights, relative to the largest in the tile, products of 16-bit words (VPMADDWD).
//
//   A part of 32 dims is four vectors. Lane l of vector j is dim 16 (l / 4) + 8 (j / 2) + 2 (l % 4) + j % 2.
#include <algorithm>

#include "attention/codes_avx2.h"
#include "attention/rows.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kPairsOfBlock = 8;
constexpr int kVectors = 4;  // from 32 bytes of each of two rows

template <class Code>
constexpr int kStretch = kWords<Code> ? kTileTokens : 32;
template <class Code>
constexpr int kStretches = kTileTokens / kStretch<Code>;
template <class Code>
constexpr int kPartDims = 256 / Code::kBits;
static_assert(int64_t(kTileTokens) * 128 * kLargestWord <= INT32_MAX);

template <class Code>
using Lookup = ByteLookup<Code, 0, 2>;

int value_width(int dim) { return dim; }

// A part of a block's 16 rows, read as pairs of rows. Rows have kDim dims, or `any_dim` if kDim is 0.
template <class Code, int kDim>
struct Rows {
  const uint8_t *codes, *planes;
  int64_t plane_stride;
  int any_dim, dim;  // dim: the first of the part

  Rows(const PageLayout& layout, const Tile::Block& block, int dim)
      : codes(v_codes(layout, block.base, block.offset) + dim * Code::kBits / 8),
        planes(v_scale(layout, block.base, block.offset)),
        plane_stride(layout.v.scale_bytes),
        any_dim(layout.v.dim),
        dim(dim) {}

  // Expands vectors 2 * half and 2 * half + 1 of the pair.
  __attribute__((always_inline)) void expand(const Lookup<Code>& lookup, int half, __m256i* to) const {
    if constexpr (kWords<Code>) {
      const __m256i a = load256(codes), b = load256(codes + stride());
      const __m256i both = half == 0 ? _mm256_unpacklo_epi16(a, b) : _mm256_unpackhi_epi16(a, b);
      to[0] = _mm256_srai_epi16(_mm256_slli_epi16(both, 8), 8), to[1] = _mm256_srai_epi16(both, 8);
      return;
    }
    lookup.expand(
        interleave(load256(codes), load256(codes + stride()), half),
        interleave(plane_bytes<Code>(planes, dim), plane_bytes<Code>(planes + plane_stride, dim), half),
        to[0], to[1]);
  }

  void advance() { codes += 2 * stride(), planes += 2 * plane_stride; }

 private:
  int stride() const { return (kDim > 0 ? kDim : any_dim) * Code::kBits / 8; }

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

  int first_block() const { return stretch * kStretch<Code> / 16; }
  // Returns a line to prefetch from the block after this one; each pair and part of a block gets one line.
  const uint8_t* ahead(int b, int dim) const {
    const Tile::Block& next = tile.next[b].base != nullptr ? tile.next[b] : tile.blocks[b];
    return v_codes(layout, next.base, next.offset) + dim / kPartDims<Code> * kPairsOfBlock * 64;
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

// Adds a row's 32-bit sums to its accumulators.
OCTAVO_INLINE void add_words(__m256i sums, __m256 factor, float* accumulators) {
  _mm256_storeu_ps(accumulators,
                   _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), factor, _mm256_loadu_ps(accumulators)));
}

constexpr float kLargestWeight = 254;  // at most 255 with the rounding error that is passed on

// Returns the limit of a stretch's sum of weights; each lane may round up by half a unit, hence the margin.
template <class Code>
constexpr float kLargestSum = float(INT16_MAX / Code::kLargestValue - 4);

// Converts a stretch's weights * scales to bytes; returns the factor that turns sums of products into floats.
template <class Code>
OCTAVO_INLINE float fix_bytes(const float* weights, const float* scales, uint32_t* pairs) {
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

// Converts a tile's weights * scales to words relative to the largest product; returns the factor as above.
OCTAVO_INLINE float fix_words(const float* weights, const float* scales, uint32_t* pairs) {
  float scaled[kTileTokens];
  for (int i = 0; i < kTileTokens; i += kLanes)
    store(scaled + i, octavo::load(weights + i) * octavo::load(scales + i));
  alignas(32) int32_t fixed[kTileTokens];
  const float largest = fix_elements(scaled, kTileTokens, kLargestWord, fixed);
  for (int i = 0; i < kTileTokens; i += 16) {
    const __m256i words = _mm256_packs_epi32(load256(fixed + i), load256(fixed + i + 8));
    store256(pairs + i / 2, _mm256_permute4x64_epi64(words, 0xd8));
  }
  return largest / kLargestWord;
}

template <class Code>
struct Weights {
  uint32_t* pairs;  // [rows][stretches][pairs]: weights of two positions, of bytes repeated
  float* factors;   // [rows][stretches]

  Weights(void* scratch, int num_rows)
      : pairs(static_cast<uint32_t*>(scratch)),
        factors(reinterpret_cast<float*>(pairs + size_t(num_rows) * kTileTokens / 2)) {}

  static size_t bytes(int, int num_rows) {
    return size_t(num_rows) * (2 * kTileTokens + 4 * kStretches<Code>);
  }

  __attribute__((always_inline)) __m256i pair(int row, int block, int pair) const {
    return _mm256_set1_epi32(int32_t(pairs[row * (kTileTokens / 2) + block * kPairsOfBlock + pair]));
  }
  __attribute__((always_inline)) __m256 factor(int row, int stretch) const {
    return _mm256_set1_ps(factors[row * kStretches<Code> + stretch]);
  }
};

// Converts the tile's weights, times their rows' scales, to fixed point. All rows are converted together,
// because one row alone is a long chain of dependent operations.
template <class Code>
void fix_tile(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows,
              const Weights<Code>& fixed) {
  float scales[kBlocks][16] = {};  // stay 0 for invisible rows
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    if (block.base == nullptr) continue;
    load_scales<Code>(v_scale(layout, block.base, block.offset), layout.v.scale_bytes, tile.mask(b),
                      scales[b]);
  }
  for (int i = 0; i < num_rows * kStretches<Code>; ++i) {
    const float *const from = weights + i * kStretch<Code>, *of = scales[i * kStretch<Code> / 16 % kBlocks];
    uint32_t* const to = fixed.pairs + i * kStretch<Code> / 2;
    if constexpr (kWords<Code>) fixed.factors[i] = fix_words(from, of, to);
    else fixed.factors[i] = fix_bytes<Code>(from, of, to);
  }
}

// Adds products of kRows rows and kCount vectors of the part at `dim`: all 4 vectors, or the 2 of `half`.
template <class Code, int kDim, int kRows, int kCount>
OCTAVO_INLINE void accumulate_rows(const Values<Code>& values, const Weights<Code>& weights, int first,
                                   int dim, int half, float* accumulators) {
  __m256i sums[kRows * kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kRows * kCount; ++i) sums[i] = _mm256_setzero_si256();
  for (int b = values.first_block(); b < values.first_block() + kStretch<Code> / 16; ++b) {
    const Tile::Block& block = values.tile.blocks[b];
    if (block.base == nullptr) continue;
    Rows<Code, kDim> rows(values.layout, block, dim);
    const uint8_t* const ahead = values.ahead(b, dim);
#pragma GCC unroll 2
    for (int pair = 0; pair < kPairsOfBlock; ++pair) {
      __builtin_prefetch(ahead + pair * 64);
#pragma GCC unroll 2
      for (int j = 0; j < kCount; j += 2) {
        __m256i codes[2];
        rows.expand(values.lookup, half + j / 2, codes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const __m256i weight = weights.pair(first + r, b, pair);
#pragma GCC unroll 2
          for (int i = 0; i < 2; ++i) {
            __m256i& sum = sums[r * kCount + j + i];
            if constexpr (kWords<Code>) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(codes[i], weight));
            else add_products(sum, weight, codes[i]);
          }
        }
      }
      rows.advance();
    }
  }
  constexpr int kFloats = kPartDims<Code> / kVectors;  // of a vector
  const int width = kDim > 0 ? kDim : values.layout.v.dim;
  accumulators += int64_t(first) * width + dim + half * 2 * kFloats;
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kCount; ++j)
      (kWords<Code> ? add_words : add_sums)(sums[r * kCount + j], weights.factor(first + r, values.stretch),
                                            accumulators + r * width + kFloats * j);
}

// Computes rows [row, row + kRows) over all stretches of the tile.
template <class Code, int kDim, int kRows>
OCTAVO_INLINE void accumulate_block(Values<Code>& values, const Weights<Code>& weights, int row,
                                    float* accumulators) {
  const int width = kDim > 0 ? kDim : values.layout.v.dim;
  for (int stretch = 0; stretch < kStretches<Code>; ++stretch) {
    if (values.tile.bits >> (stretch * kStretch<Code>) << (kTileTokens - kStretch<Code>) == 0) continue;
    values.stretch = stretch;
    for (int dim = 0; dim < width; dim += kPartDims<Code>)
      if constexpr (kRows == 4)
        for (int half = 0; half < 2; ++half)
          accumulate_rows<Code, kDim, 4, 2>(values, weights, row, dim, half, accumulators);
      else accumulate_rows<Code, kDim, kRows, 4>(values, weights, row, dim, 0, accumulators);
  }
}

template <class Code, int kDim>
void accumulate_dims(const PageLayout& layout, const Tile& tile, const Weights<Code>& weights, int num_rows,
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
  const Weights<Code> fixed(scratch, num_rows);
  fix_tile<Code>(layout, tile, weights, num_rows, fixed);
  const int dim = layout.v.dim;
  const auto run = dim == 64    ? accumulate_dims<Code, 64>
                   : dim == 128 ? accumulate_dims<Code, 128>
                                : accumulate_dims<Code, 0>;
  run(layout, tile, fixed, num_rows, accumulators);
}

// Returns the dim of float i of a part's accumulators; bytes have a vector's even lanes before its odd ones.
template <class Code>
constexpr int dim_of(int i) {
  if (kWords<Code>) return i % 8 / 4 * 16 + i / 16 * 8 + i % 4 * 2 + i / 8 % 2;
  const int lane = 2 * (i % 8) + i / 8 % 2, vector = i / 16;
  return 2 * (lane / 8 * 16 + vector / 2 * 8 + lane % 8) + vector % 2;
}

template <class Code>
constexpr ValueSide sides = {value_width, Weights<Code>::bytes, accumulate<Code>,
                             to_natural<kPartDims<Code>, dim_of<Code>>};

}  // namespace

const ValueSide* special_value_side(const AttendArgs& args) {
  const RowFormat& format = args.layout.v;
  if (!takes_integers(args, format)) return nullptr;
  return integer_side(format.codes, [](auto code) { return &sides<decltype(code)>; });
}

}  // namespace octavo::OCTAVO_ISA
