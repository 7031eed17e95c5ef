// Weighted sums over fp4, fp5 and int4 pages by 16-bit integer products (VPMADDWD), exact: softmax weights,
// times the scale of their row, become 15-bit fixed point of the largest in a tile.
//
//   Of each two positions the 16-bit words of a chunk are interleaved; their lower and upper halves (of each
//   128 bits) are a half chunk of four vectors of lane pairs.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/rows.h"
#include "attention/sides_avx2.h"
#include "attention/words_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

int value_width(int dim) { return dim; }

// The panel: [half chunks][32 pairs of positions][4 vectors]; then weights, factors and offsets.
size_t value_panel_bytes(int dim, int num_rows) {
  return size_t(dim) * 2 * kTileTokens + size_t(num_rows) * (2 * kTileTokens + 8);
}

struct Weights {
  int16_t* fixed;  // [rows][64]
  float* factors;
  uint32_t* offsets;

  Weights(void* scratch, int dim, int num_rows)
      : fixed(reinterpret_cast<int16_t*>(static_cast<uint8_t*>(scratch) + size_t(dim) * 2 * kTileTokens)),
        factors(reinterpret_cast<float*>(fixed + size_t(num_rows) * kTileTokens)),
        offsets(reinterpret_cast<uint32_t*>(factors + num_rows)) {}
};

// weights * scales of one row in fixed point of the largest
template <class Code>
OCTAVO_INLINE void fix_weights(const float* weights, const float* scales, int row, const Weights& to) {
  __m256 scaled[8], largest = _mm256_setzero_ps();
  for (int i = 0; i < 8; ++i) {
    scaled[i] = _mm256_mul_ps(_mm256_loadu_ps(weights + 8 * i), _mm256_loadu_ps(scales + 8 * i));
    largest = _mm256_max_ps(largest, scaled[i]);
  }
  float lanes[8];
  _mm256_storeu_ps(lanes, largest);
  const float top = *std::max_element(lanes, lanes + 8);
  const __m256 to_fixed = _mm256_set1_ps(top > 1e-30f ? kLargestFixed / top : 0.0f);
  __m256i sum = _mm256_setzero_si256();
  for (int i = 0; i < 8; ++i) {
    const __m256i fixed = _mm256_cvtps_epi32(_mm256_mul_ps(scaled[i], to_fixed));
    sum = _mm256_add_epi32(sum, fixed);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(fixed), _mm256_extracti128_si256(fixed, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to.fixed + row * kTileTokens + 8 * i), words);
  }
  uint32_t sums[8], total = 0;
  store256(sums, sum);
  for (const uint32_t part : sums) total += part;
  to.factors[row] = top / (kLargestFixed * Code::kScale);
  to.offsets[row] = total * kWordOffset<Code>;
}

template <class Code>
struct Values {
  const PageLayout& layout;
  const Tile& tile;
  const WordLookup<Code>& lookup;
  const uint8_t* panel;  // null: read the codes

  // Half chunk `part` of the pair-th two positions of a block, expanded.
  OCTAVO_INLINE void expand(const Values& values, int block, int pair, int part, __m256i (&to)[4]) {
    const RowFormat& format = values.layout.v;
    const Tile::Block& from = values.tile.blocks[block];
    const int first = from.offset + 2 * pair, dim = part / 2 * kChunk;
    const uint8_t* codes = v_codes(values.layout, from.base, first) + dim / 2;
    const uint8_t* planes = v_scale(values.layout, from.base, first);
    values.lookup.expand(
        interleave(load256(codes), load256(codes + format.row_bytes), part % 2),
        interleave(low_bits<Code>(planes, dim), low_bits<Code>(planes + format.scale_bytes, dim), part % 2),
        to);
  }

  // The lower (upper: half 1) words of each 128 bits, by turns.
  OCTAVO_INLINE __m256i interleave(__m256i first, __m256i second, int half) {
    return half == 0 ? _mm256_unpacklo_epi16(first, second) : _mm256_unpackhi_epi16(first, second);
  }
};

template <class Code, int kRows>
OCTAVO_INLINE void accumulate_rows(const Values<Code>& values, const Weights& weights, int first, int part,
                                   float* accumulators) {
  __m256i sums[kRows][4];
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < 4; ++j) sums[r][j] = _mm256_setzero_si256();
  const int16_t* fixed = weights.fixed + size_t(first) * kTileTokens;
  for (int b = 0; b < kBlocks; ++b) {
    if (values.tile.blocks[b].base == nullptr) continue;
    for (int pair = 0; pair < 8; ++pair) {
      __m256i lanes[4];
      if (values.panel != nullptr)
        for (int j = 0; j < 4; ++j)
          lanes[j] = load256(values.panel + ((part * 32 + 8 * b + pair) * 4 + j) * 32);
      else Values<Code>::expand(values, b, pair, part, lanes);
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        int32_t two;
        std::memcpy(&two, fixed + r * kTileTokens + 16 * b + 2 * pair, 4);
        const __m256i weight = _mm256_set1_epi32(two);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j)
          sums[r][j] = _mm256_add_epi32(sums[r][j], _mm256_madd_epi16(lanes[j], weight));
      }
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
    const __m256i offset = _mm256_set1_epi32(int32_t(weights.offsets[first + r]));
    const __m256 factor = _mm256_set1_ps(weights.factors[first + r]);
    float* to = accumulators + int64_t(first + r) * values.layout.v.dim + part * 32;
    for (int j = 0; j < 4; ++j, to += 8) {
      const __m256 exact = _mm256_cvtepi32_ps(_mm256_sub_epi32(sums[r][j], offset));
      _mm256_storeu_ps(to, _mm256_fmadd_ps(exact, factor, _mm256_loadu_ps(to)));
    }
  }
}

template <class Code>
void expand_values(const Values<Code>& values, uint8_t* panel) {
  const int num_parts = values.layout.v.dim / 32;
  for (int b = 0; b < kBlocks; ++b) {
    if (values.tile.blocks[b].base == nullptr) continue;
    for (int pair = 0; pair < 8; ++pair)
      for (int part = 0; part < num_parts; ++part) {
        __m256i lanes[4];
        Values<Code>::expand(values, b, pair, part, lanes);
        for (int j = 0; j < 4; ++j) store256(panel + ((part * 32 + 8 * b + pair) * 4 + j) * 32, lanes[j]);
      }
  }
}

template <class Code>
void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  const WordLookup<Code> lookup;
  float scales[kTileTokens] = {};
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (next.base != nullptr) {
      prefetch(v_codes(layout, next.base, next.offset), 16 * layout.v.row_bytes);
      prefetch(v_scale(layout, next.base, next.offset), 16 * layout.v.scale_bytes);
    }
    if (block.base == nullptr) continue;
    float some[16];
    Code::load_scales(v_scale(layout, block.base, block.offset), layout.v.scale_bytes, tile.mask(b), some);
    std::copy(some, some + 16, scales + 16 * b);
  }
  const Weights fixed(scratch, layout.v.dim, num_rows);
  for (int row = 0; row < num_rows; ++row) fix_weights<Code>(weights + row * kTileTokens, scales, row, fixed);
  uint8_t* const panel = static_cast<uint8_t*>(scratch);
  Values<Code> values{layout, tile, lookup, nullptr};
  if (num_rows > kDirectRows) {
    expand_values(values, panel);
    values.panel = panel;
  }
  for (int part = 0; part < layout.v.dim / 32; ++part) {
    int row = 0;
    for (; row + 2 <= num_rows; row += 2) accumulate_rows<Code, 2>(values, fixed, row, part, accumulators);
    if (row < num_rows) accumulate_rows<Code, 1>(values, fixed, row, part, accumulators);
  }
}

// Lane l of vector j of half h of a chunk is dim 4 w + j of the chunk, w = l / 4 * 8 + 4 h + l % 4.
void to_natural(int dim, const float* accumulator, float* row) {
  for (int i = 0; i < dim; ++i) {
    const int lane = i % 8, j = i / 8 % 4, half = i / 32 % 2;
    row[i / kChunk * kChunk + 4 * (lane / 4 * 8 + 4 * half + lane % 4) + j] = accumulator[i];
  }
}

template <class Code>
constexpr ValueSide sides = {value_width, value_panel_bytes, accumulate<Code>, to_natural};

}  // namespace

const ValueSide* word_values(CodeType codes) {
  return side_of<ValueSide>(codes, [](auto code) { return &sides<decltype(code)>; });
}

}  // namespace octavo::OCTAVO_ISA
