// Value side for int8 pages: exact 16-bit integer products (VPMADDWD). Softmax weights are multiplied by the
// scale of their V row and become 15-bit fixed point relative to the largest in the tile.
//
//   A part is 32 dims of two positions, as 16-bit words that alternate: in vector j, 32-bit lane l is dim
//   16 (l / 4) + 8 (j / 2) + 2 (l % 4) + j % 2.
#include <algorithm>
#include <cstring>

#include "attention/byte_queries_avx2.h"
#include "attention/rows.h"
#include "attention/sides_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kPart = 32, kVectors = 4;

int value_width(int dim) { return dim; }

static_assert(int64_t(kTileTokens) * 128 * kLargestWord <= INT32_MAX);

// Weights of each row for the tile, and the row's factor.
struct Weights {
  int16_t* fixed;
  float* factors;

  Weights(void* scratch, int num_rows)
      : fixed(static_cast<int16_t*>(scratch)),
        factors(reinterpret_cast<float*>(fixed + size_t(num_rows) * kTileTokens)) {}
};

size_t value_panel_bytes(int, int num_rows) { return size_t(num_rows) * (2 * kTileTokens + 4); }

// Converts weights * scales of one row to fixed point relative to the largest product.
OCTAVO_INLINE void fix_weights(const float* weights, const float* scales, int row, const Weights& to) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 scaled[kTileTokens / 8], top = _mm256_setzero_ps();
#pragma GCC unroll 8
  for (int i = 0; i < kTileTokens / 8; ++i) {
    scaled[i] = _mm256_mul_ps(_mm256_loadu_ps(weights + 8 * i), _mm256_loadu_ps(scales + 8 * i));
    top = _mm256_max_ps(top, _mm256_andnot_ps(sign, scaled[i]));
  }
  const float largest = octavo::largest_lane((Vec)top);
  const __m256 to_fixed = _mm256_set1_ps(largest > 1e-30f ? kLargestWord / largest : 0.0f);
#pragma GCC unroll 4
  for (int i = 0; i < kTileTokens / 8; i += 2) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(scaled[i], to_fixed)),
                                             _mm256_cvtps_epi32(_mm256_mul_ps(scaled[i + 1], to_fixed)));
    store256(to.fixed + size_t(row) * kTileTokens + 8 * i, _mm256_permute4x64_epi64(words, 0xd8));
  }
  to.factors[row] = largest / kLargestWord;
}

// Widens two rows of codes to 16-bit words, which alternate.
OCTAVO_INLINE void widen_pair(const uint8_t* first, const uint8_t* second, __m256i (&to)[kVectors]) {
  const __m256i a = load256(first), b = load256(second);
  const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
  to[0] = _mm256_srai_epi16(_mm256_slli_epi16(low, 8), 8), to[1] = _mm256_srai_epi16(low, 8);
  to[2] = _mm256_srai_epi16(_mm256_slli_epi16(high, 8), 8), to[3] = _mm256_srai_epi16(high, 8);
}

struct Values {
  const PageLayout& layout;
  const Tile& tile;

  const uint8_t* codes(int block, int part) const {
    return v_codes(layout, tile.blocks[block].base, tile.blocks[block].offset) + part * kPart;
  }
  const uint8_t* ahead(int block) const {
    const Tile::Block& next = tile.next[block].base != nullptr ? tile.next[block] : tile.blocks[block];
    return v_codes(layout, next.base, next.offset);
  }
};

template <int kRows>
OCTAVO_INLINE void accumulate_rows(const Values& values, const Weights& weights, int first, int part,
                                   float* accumulators) {
  const int dim = values.layout.v.dim;
  __m256i sums[kRows][kVectors];
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sums[r][j] = _mm256_setzero_si256();
  for (int b = 0; b < kBlocks; ++b) {
    if (values.tile.blocks[b].base == nullptr) continue;
    const uint8_t* from = values.codes(b, part);
    const uint8_t* const ahead = values.ahead(b) + part * 8 * 64;
    const int16_t* fixed = weights.fixed + size_t(first) * kTileTokens + 16 * b;
    for (int pair = 0; pair < 8; ++pair) {
      __m256i words[kVectors];
      __builtin_prefetch(ahead + pair * 64);
      widen_pair(from, from + dim, words);
      from += 2 * dim;
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        int32_t two;
        std::memcpy(&two, fixed + r * kTileTokens + 2 * pair, 4);
        const __m256i weight = _mm256_set1_epi32(two);
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j)
          sums[r][j] = _mm256_add_epi32(sums[r][j], _mm256_madd_epi16(words[j], weight));
      }
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
    const __m256 factor = _mm256_set1_ps(weights.factors[first + r]);
    float* to = accumulators + int64_t(first + r) * dim + part * kPart;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j, to += 8) {
      _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][j]), factor, _mm256_loadu_ps(to)));
    }
  }
}

void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  const int dim = layout.v.dim;
  float scales[kBlocks][16] = {};  // stay 0 for invisible rows
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (next.base != nullptr) prefetch(v_scale(layout, next.base, next.offset), 16 * layout.v.scale_bytes);
    if (block.base != nullptr)
      load_halves(v_scale(layout, block.base, block.offset), tile.mask(b), scales[b]);
  }
  const Weights fixed(scratch, num_rows);
  for (int row = 0; row < num_rows; ++row) fix_weights(weights + row * kTileTokens, scales[0], row, fixed);
  const Values values{layout, tile};
  for (int part = 0; part < dim / kPart; ++part) {
    int row = 0;
    for (; row + 2 <= num_rows; row += 2) accumulate_rows<2>(values, fixed, row, part, accumulators);
    if (row < num_rows) accumulate_rows<1>(values, fixed, row, part, accumulators);
  }
}

void to_natural(int dim, const float* accumulator, float* row) {
  for (int d = 0; d < dim; d += kPart)
    for (int half = 0; half < 2; ++half, accumulator += 16) {
      const __m256 even = _mm256_loadu_ps(accumulator), odd = _mm256_loadu_ps(accumulator + 8);
      const __m256 first = _mm256_unpacklo_ps(even, odd), second = _mm256_unpackhi_ps(even, odd);
      float* const to = row + d + 8 * half;
      _mm256_storeu_ps(to, _mm256_permute2f128_ps(first, second, 0x20));
      _mm256_storeu_ps(to + kPart / 2, _mm256_permute2f128_ps(first, second, 0x31));
    }
}

constexpr ValueSide sides = {value_width, value_panel_bytes, accumulate, to_natural};

}  // namespace

const ValueSide* int8_values(CodeType codes) { return codes == CodeType::int8 ? &sides : nullptr; }

}  // namespace octavo::OCTAVO_ISA
