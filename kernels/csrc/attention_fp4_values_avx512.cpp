// Weighted sums over fp4 pages (attention_fp4_avx512.h).
//
//   V panel  [16][width][4 positions]    signed: twice the value
#include <algorithm>
#include <cmath>

#include "attention_fp4_avx512.h"
#include "attention_rows.h"

namespace octavo::OCTAVO_ISA {
namespace {

// A chunk of 64 code bytes (128 dims) becomes 8 vectors.

int value_width(int dim) { return (dim + 127) / 128 * 128; }

// The panel, then per row 64 high bytes, 64 low bytes and a factor.
size_t value_panel_bytes(int dim, int num_rows) {
  return size_t(value_width(dim)) * kTileTokens + size_t(num_rows) * (2 * kTileTokens + 4);
}

// Four rows of code bytes to 8 vectors of four signed bytes each, one byte per row. Lane 4 c + k of
// vector 2 m + n is dim 2 (16 c + 4 m + k) + n.
OCTAVO_INLINE void expand_values(const __m512i (&rows)[4], __m512i lookup, __m512i* to) {
  const __m512i ab_low = _mm512_unpacklo_epi8(rows[0], rows[1]);
  const __m512i ab_high = _mm512_unpackhi_epi8(rows[0], rows[1]);
  const __m512i cd_low = _mm512_unpacklo_epi8(rows[2], rows[3]);
  const __m512i cd_high = _mm512_unpackhi_epi8(rows[2], rows[3]);
  const __m512i quads[4] = {_mm512_unpacklo_epi16(ab_low, cd_low), _mm512_unpackhi_epi16(ab_low, cd_low),
                            _mm512_unpacklo_epi16(ab_high, cd_high), _mm512_unpackhi_epi16(ab_high, cd_high)};
#pragma GCC unroll 4
  for (int m = 0; m < 4; ++m) {
    to[2 * m] = _mm512_shuffle_epi8(lookup, low_nibbles(quads[m]));
    to[2 * m + 1] = _mm512_shuffle_epi8(lookup, high_nibbles(quads[m]));
  }
}

void load_values(const PageLayout& layout, const Tile& tile, __m512i* panel) {
  const __m512i lookup = table(0);
  const int64_t row_bytes = layout.v.row_bytes;
  const int num_vectors = value_width(layout.v.dim) / 16;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (block.base == nullptr) continue;
    const uint8_t* from = v_codes(layout, block.base, block.offset);
    if (next.base != nullptr) {
      prefetch(v_codes(layout, next.base, next.offset), 16 * row_bytes);
      prefetch(v_scale(layout, next.base, next.offset), 1);
    }
    for (int64_t byte = 0; byte < row_bytes; byte += 64) {
      const int64_t count = std::min<int64_t>(64, row_bytes - byte);
      const __mmask64 valid = ~uint64_t(0) >> (64 - count);
      for (int quad = 0; quad < 4; ++quad) {
        __m512i rows[4];
#pragma GCC unroll 4
        for (int t = 0; t < 4; ++t)
          rows[t] = _mm512_maskz_loadu_epi8(valid, from + (4 * quad + t) * row_bytes + byte);
        expand_values(rows, lookup, panel + size_t(4 * b + quad) * num_vectors + byte / 8);
      }
    }
  }
}

struct Weights {
  uint8_t* bytes;
  float* factors;

  Weights(void* scratch, int dim, int num_rows)
      : bytes(static_cast<uint8_t*>(scratch) + size_t(value_width(dim)) * kTileTokens),
        factors(reinterpret_cast<float*>(bytes + size_t(num_rows) * 2 * kTileTokens)) {}
};

// weights[row] * scales as 16-bit fixed point of the row's largest
OCTAVO_INLINE void fix_weights(const float* weights, const __m512 (&scales)[kBlocks], uint8_t* bytes,
                               float& factor) {
  __m512 scaled[kBlocks], largest = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    scaled[b] = _mm512_mul_ps(_mm512_loadu_ps(weights + 16 * b), scales[b]);
    largest = _mm512_max_ps(largest, scaled[b]);
  }
  const float top = _mm512_reduce_max_ps(largest);
  const __m512 to_fixed = _mm512_set1_ps(top > 1e-30f ? 65535.0f / top : 0.0f);
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    const __m512i fixed = _mm512_cvtps_epi32(_mm512_mul_ps(scaled[b], to_fixed));
    const __m128i high = _mm512_cvtepi32_epi8(_mm512_srli_epi32(fixed, 8));
    const __m128i low = _mm512_cvtepi32_epi8(fixed);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + 16 * b), high);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + kTileTokens + 16 * b), low);
  }
  factor = top / 65535.0f * 0.5f;
}

template <int kRows>
OCTAVO_INLINE void accumulate_rows(const Weights& weights, int first, const __m512i* panel, int num_vectors,
                                   uint32_t blocks, float* accumulators) {
  for (int vector = 0; vector < num_vectors; vector += 4) {
    __m512i high[kRows][4], low[kRows][4];
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) high[r][v] = low[r][v] = _mm512_setzero_si512();
    for (int b = 0; b < kBlocks; ++b) {
      if (!(blocks >> b & 1)) continue;
      for (int quad = 4 * b; quad < 4 * b + 4; ++quad) {
        const __m512i* values = panel + size_t(quad) * num_vectors + vector;
        const uint8_t* from = weights.bytes + size_t(first) * 2 * kTileTokens + 4 * quad;
#pragma GCC unroll 3
        for (int r = 0; r < kRows; ++r) {
          const __m512i upper = broadcast4(from + r * 2 * kTileTokens);
          const __m512i lower = broadcast4(from + r * 2 * kTileTokens + kTileTokens);
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v) {
            high[r][v] = _mm512_dpbusd_epi32(high[r][v], upper, values[v]);
            low[r][v] = _mm512_dpbusd_epi32(low[r][v], lower, values[v]);
          }
        }
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      const __m512 factor = _mm512_set1_ps(weights.factors[first + r]);
      float* to = accumulators + (size_t(first + r) * num_vectors + vector) * 16;
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const __m512 sum = _mm512_cvtepi32_ps(join(high[r][v], low[r][v]));
        _mm512_storeu_ps(to + 16 * v, _mm512_fmadd_ps(sum, factor, _mm512_loadu_ps(to + 16 * v)));
      }
    }
  }
}

void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  __m512i* const panel = static_cast<__m512i*>(scratch);
  const int num_vectors = value_width(layout.v.dim) / 16;
  load_values(layout, tile, panel);
  __m512 scales[kBlocks];
  uint32_t blocks = 0;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    scales[b] = block.base == nullptr ? _mm512_setzero_ps()
                                      : halves(v_scale(layout, block.base, block.offset), tile.mask(b));
    blocks |= uint32_t(block.base != nullptr) << b;
  }
  const Weights fixed(scratch, layout.v.dim, num_rows);
  for (int r = 0; r < num_rows; ++r)
    fix_weights(weights + size_t(r) * kTileTokens, scales, fixed.bytes + size_t(r) * 2 * kTileTokens,
                fixed.factors[r]);
  for_row_blocks(num_rows, [&]<int kRows>(int row) {
    accumulate_rows<kRows>(fixed, row, panel, num_vectors, blocks, accumulators);
  });
}

void to_natural(int dim, const float* accumulator, float* row) {
  for (int first = 0; first < dim; first += 128, accumulator += 128)
    for (int c = 0; c < 4; ++c)
      for (int m = 0; m < 4; ++m) {
        const int to = first + 32 * c + 8 * m;
        if (to >= dim) continue;
        const __m128 even = _mm_loadu_ps(accumulator + 32 * m + 4 * c);
        const __m128 odd = _mm_loadu_ps(accumulator + 32 * m + 16 + 4 * c);
        _mm_storeu_ps(row + to, _mm_unpacklo_ps(even, odd));
        _mm_storeu_ps(row + to + 4, _mm_unpackhi_ps(even, odd));
      }
}

}  // namespace

const ValueSide fp4_values = {value_width, value_panel_bytes, accumulate, to_natural};

}  // namespace octavo::OCTAVO_ISA
