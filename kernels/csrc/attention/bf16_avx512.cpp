// Key side and value side for bf16 pages and queries: products of bf16 pairs, in float32 sums (vdpbf16ps).
//
//   K panel  [dim / 2][64 positions][2]
//   V panel  [32][width][2 positions]
#include <algorithm>
#include <cstring>

#include "attention/ahead.h"
#include "attention/rows.h"
#include "attention/sides_avx512.h"

namespace octavo::OCTAVO_ISA {
namespace {

OCTAVO_INLINE __m512bh broadcast2(const void* from) {
  int32_t two;
  std::memcpy(&two, from, 4);
  return (__m512bh)_mm512_set1_epi32(two);
}

int padded_dim(int dim) { return (dim + 31) / 32 * 32; }

// ---- queries: rows of padded_dim bf16 values, zeros past dim ----

size_t query_bytes(int dim, int num_rows) { return size_t(num_rows) * padded_dim(dim) * 2; }

void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
  const int num_rows = item.num_tokens * group_size(args), dim = args.layout.k.dim;
  uint16_t* to = static_cast<uint16_t*>(memory);
  alignas(64) float row[kMaxDim];
  for (int r = 0; r < num_rows; ++r, to += padded_dim(dim)) {
    load_query(args, item, r, row);
    for (int d = 0; d < padded_dim(dim); ++d) to[d] = d < dim ? float_to_bf16(row[d]) : 0;
  }
}

// ---- K ----

size_t key_panel_bytes(int dim) { return size_t(padded_dim(dim)) * kTileTokens * 2; }

void load_keys(const PageLayout& layout, const Tile& tile, __m512i* panel) {
  const int64_t row_bytes = layout.k.row_bytes;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    if (block.base == nullptr) continue;
    const uint8_t* from = k_codes(layout, block.base, block.offset);
    __m512i* to = panel + b;
    const Ahead ahead(layout, tile, b, kDistance);
    const int parts = int((row_bytes + 63) / 64);
    for (int64_t byte = 0; byte < row_bytes; byte += 64, to += 16 * kBlocks) {
      ahead.prefetch_part(int(byte / 64), parts);
      const int64_t count = std::min<int64_t>(32, (row_bytes - byte) / 2);
      const __mmask32 valid = ~uint32_t(0) >> (32 - count);
      __m512i rows[16];
#pragma GCC unroll 16
      for (int t = 0; t < 16; ++t) rows[t] = _mm512_maskz_loadu_epi16(valid, from + t * row_bytes + byte);
      transpose16(rows);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) to[i * kBlocks] = rows[i];
    }
  }
}

// Computes the scores of all blocks.
template <int kRows>
OCTAVO_INLINE void score_rows(const uint16_t* queries, int dim, const __m512i* panel, float* scores) {
  __m512 sums[kRows][kBlocks];
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) sums[r][b] = _mm512_setzero_ps();
  for (int d = 0; d < dim; d += 2, panel += kBlocks) {
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      const __m512bh pair = broadcast2(queries + r * dim + d);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) add_dots(sums[r][b], (__m512bh)panel[b], pair);
    }
  }
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) _mm512_storeu_ps(scores + r * kTileTokens + 16 * b, sums[r][b]);
}

// Scores a few rows while transposing K, without storing K's panel. Sums have the same order as with a panel.
template <int kRows>
void score_directly(const PageLayout& layout, const Tile& tile, const uint16_t* queries, float* scores) {
  const int64_t row_bytes = layout.k.row_bytes;
  const int dim = padded_dim(layout.k.dim), parts = int((row_bytes + 63) / 64);
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    if (block.base == nullptr) continue;
    const uint8_t* from = k_codes(layout, block.base, block.offset);
    const Ahead ahead(layout, tile, b, kDistance);
    __m512 sums[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sums[r] = _mm512_setzero_ps();
    for (int part = 0; part < parts; ++part) {
      const int64_t count = std::min<int64_t>(32, row_bytes / 2 - 32 * part);
      const __mmask32 valid = ~uint32_t(0) >> (32 - count);
      __m512i pairs[16];
#pragma GCC unroll 16
      for (int t = 0; t < 16; ++t)
        pairs[t] = _mm512_maskz_loadu_epi16(valid, from + t * row_bytes + 64 * part);
      transpose16(pairs);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        ahead.prefetch_line(16 * part + i);  // one at a time, because many at once delay other loads
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          add_dots(sums[r], (__m512bh)pairs[i], broadcast2(queries + r * dim + 32 * part + 2 * i));
          settle(sums[r]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(scores + r * kTileTokens + 16 * b, sums[r]);
  }
}

void score(const PageLayout& layout, const Tile& tile, const void* memory, int num_rows, void* scratch,
           float* scores) {
  __m512i* const panel = static_cast<__m512i*>(scratch);
  const int dim = padded_dim(layout.k.dim);
  const uint16_t* queries = static_cast<const uint16_t*>(memory);
  switch (num_rows) {
    case 1: return score_directly<1>(layout, tile, queries, scores);
    case 2: return score_directly<2>(layout, tile, queries, scores);
    case 3: return score_directly<3>(layout, tile, queries, scores);
    case kDirectRows: return score_directly<kDirectRows>(layout, tile, queries, scores);
    default: break;
  }
  load_keys(layout, tile, panel);
  for_row_blocks(num_rows, [&]<int kRows>(int row) {
    score_rows<kRows>(queries + size_t(row) * dim, dim, panel, scores + size_t(row) * kTileTokens);
  });
}

// ---- V ----

// Returns the size of a tile's V panel and, behind it, 64 bf16 weights per row.
size_t value_panel_bytes(int dim, int num_rows) {
  return size_t(padded_dim(dim)) * kTileTokens * 2 + size_t(num_rows) * kTileTokens * 2;
}

// Lane 4 c + k of vector 2 j is dim 32 j + 8 c + k of V, and of vector 2 j + 1 it is dim 32 j + 8 c + k + 4.
void load_values(const PageLayout& layout, const Tile& tile, __m512i* panel) {
  const int64_t row_bytes = layout.v.row_bytes;
  const int num_vectors = padded_dim(layout.v.dim) / 16;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    if (block.base == nullptr) continue;
    const uint8_t* from = v_codes(layout, block.base, block.offset);
    const uint32_t visible = tile.mask(b);
    const Ahead ahead(layout, tile, kBlocks + b, kDistance);
    for (int pair = 0; pair < 8; ++pair) {
      ahead.prefetch_part(pair, 8);
      __m512i* to = panel + size_t(8 * b + pair) * num_vectors;
      for (int64_t byte = 0; byte < row_bytes; byte += 64, to += 2) {
        const int64_t count = std::min<int64_t>(32, (row_bytes - byte) / 2), at = 2 * pair * row_bytes + byte;
        const __mmask32 valid = ~uint32_t(0) >> (32 - count);
        // Invisible rows may contain NaN, and their weight of 0 would not remove it.
        const __mmask32 first_valid = visible >> (2 * pair) & 1 ? valid : 0;
        const __mmask32 second_valid = visible >> (2 * pair + 1) & 1 ? valid : 0;
        const __m512i first = _mm512_maskz_loadu_epi16(first_valid, from + at);
        const __m512i second = _mm512_maskz_loadu_epi16(second_valid, from + at + row_bytes);
        to[0] = _mm512_unpacklo_epi16(first, second);
        to[1] = _mm512_unpackhi_epi16(first, second);
      }
    }
  }
}

// Accumulates kVecs SIMD vectors, beginning with number `vector`. That many sums hide the products' latency.
template <int kRows, int kVecs>
OCTAVO_INLINE void accumulate_vectors(const uint16_t* weights, const __m512i* panel, int num_vectors,
                                      int vector, uint32_t blocks, float* accumulators) {
  __m512 sums[kRows][kVecs];
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v)
      sums[r][v] = _mm512_loadu_ps(accumulators + (r * num_vectors + vector + v) * 16);
  for (int b = 0; b < kBlocks; ++b) {
    if (!(blocks >> b & 1)) continue;
    for (int pair = 8 * b; pair < 8 * b + 8; ++pair) {
      const __m512i* values = panel + size_t(pair) * num_vectors + vector;
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) {
        const __m512bh two = broadcast2(weights + r * kTileTokens + 2 * pair);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) add_dots(sums[r][v], (__m512bh)values[v], two);
      }
    }
  }
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v)
      _mm512_storeu_ps(accumulators + (r * num_vectors + vector + v) * 16, sums[r][v]);
}

template <int kRows>
OCTAVO_INLINE void accumulate_rows(const uint16_t* weights, const __m512i* panel, int num_vectors,
                                   uint32_t blocks, float* accumulators) {
  int vector = 0;
  for (; vector + 4 <= num_vectors; vector += 4)
    accumulate_vectors<kRows, 4>(weights, panel, num_vectors, vector, blocks, accumulators);
  for (; vector < num_vectors; vector += 2)
    accumulate_vectors<kRows, 2>(weights, panel, num_vectors, vector, blocks, accumulators);
}

// Accumulates a few rows while interleaving V, without storing a panel. Sums have the same order as with a
// panel. Each pass over the rows of V computes kVecs vectors of dims.
template <int kRows, int kVecs>
void accumulate_directly(const PageLayout& layout, const Tile& tile, const uint16_t* weights,
                         float* accumulators) {
  const int64_t row_bytes = layout.v.row_bytes;
  const int num_vectors = layout.v.dim / 16;
  for (int vector = 0; vector < num_vectors; vector += kVecs) {
    __m512 sums[kRows][kVecs];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v)
        sums[r][v] = _mm512_loadu_ps(accumulators + (r * num_vectors + vector + v) * 16);
    for (int b = 0; b < kBlocks; ++b) {
      const Tile::Block& block = tile.blocks[b];
      if (block.base == nullptr) continue;
      const uint8_t* from = v_codes(layout, block.base, block.offset) + 32 * vector;
      const uint32_t visible = tile.mask(b);
      const Ahead ahead(layout, tile, kBlocks + b, kDistance);
      for (int pair = 0; pair < 8; ++pair, from += 2 * row_bytes) {
        const __mmask32 first_valid = visible >> (2 * pair) & 1 ? ~uint32_t(0) : 0;
        const __mmask32 second_valid = visible >> (2 * pair + 1) & 1 ? ~uint32_t(0) : 0;
#pragma GCC unroll 4
        for (int c = 0; c < kVecs / 2; ++c) {
          if (vector == 0) ahead.prefetch_part(pair * kVecs / 2 + c, 4 * kVecs);
          const __m512i first = _mm512_maskz_loadu_epi16(first_valid, from + 64 * c);
          const __m512i second = _mm512_maskz_loadu_epi16(second_valid, from + row_bytes + 64 * c);
          const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(first, second);
          const __m512bh high = (__m512bh)_mm512_unpackhi_epi16(first, second);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const __m512bh two = broadcast2(weights + r * kTileTokens + 16 * b + 2 * pair);
            add_dots(sums[r][2 * c], low, two);
            add_dots(sums[r][2 * c + 1], high, two);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v)
        _mm512_storeu_ps(accumulators + (r * num_vectors + vector + v) * 16, sums[r][v]);
  }
}

// Returns the function that multiplies this many rows without a panel, 8 or 4 vectors per pass; null if a
// panel is faster.
using DirectValues = void (*)(const PageLayout&, const Tile&, const uint16_t*, float*);
DirectValues direct_values(int dim, int num_rows) {
  if (dim % 64 != 0) return nullptr;
  const bool long_passes = dim % 128 == 0;
  switch (num_rows) {
    case 1: return long_passes ? accumulate_directly<1, 8> : accumulate_directly<1, 4>;
    case 2: return long_passes ? accumulate_directly<2, 8> : accumulate_directly<2, 4>;
    case 3: return accumulate_directly<3, 4>;
    case kDirectRows: return accumulate_directly<kDirectRows, 4>;
    default: return nullptr;
  }
}

void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  __m512i* const panel = static_cast<__m512i*>(scratch);
  const int width = padded_dim(layout.v.dim);
  uint32_t blocks = 0;
  for (int b = 0; b < kBlocks; ++b) blocks |= uint32_t(tile.blocks[b].base != nullptr) << b;
  uint16_t* const rounded = reinterpret_cast<uint16_t*>(panel + size_t(width) * kTileTokens * 2 / 64);
  round_to_bf16(weights, num_rows * kTileTokens, rounded);
  if (const DirectValues direct = direct_values(layout.v.dim, num_rows))
    return direct(layout, tile, rounded, accumulators);
  load_values(layout, tile, panel);
  for_row_blocks(num_rows, [&]<int kRows>(int row) {
    const uint16_t* from = rounded + size_t(row) * kTileTokens;
    float* to = accumulators + size_t(row) * width;
    accumulate_rows<kRows>(from, panel, width / 16, blocks, to);
  });
}

// Returns the dim of float i of two vectors, see load_values.
constexpr int dim_of(int i) { return i % 16 / 4 * 8 + i / 16 * 4 + i % 4; }

}  // namespace

const KeySide bf16_keys = {query_bytes, key_panel_bytes, load_queries, score};
const ValueSide bf16_values = {padded_dim, value_panel_bytes, accumulate, to_natural<32, dim_of>};

}  // namespace octavo::OCTAVO_ISA
