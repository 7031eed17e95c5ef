// Rows of V as bytes. Bytes of two positions alternate, because a 16-bit lane of VPMADDUBSW adds two
// products.
//
//   A chunk of 64 dims is four vectors. Lane i of vector j is dim 2 b + j % 2, where b = i / 8 * 16 + j / 2 *
//   8
//   + i % 8.
#pragma once

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

inline int value_width(int dim) { return dim; }

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

// Copies a chunk of an accumulator, [4 vectors][even lanes, odd lanes], to the order of dims. In each 128
// bits, lanes 2 i and 2 i + 1 of two vectors hold four consecutive dims.
inline void to_natural(int dim, const float* accumulator, float* row) {
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

}  // namespace
}  // namespace octavo::OCTAVO_ISA
