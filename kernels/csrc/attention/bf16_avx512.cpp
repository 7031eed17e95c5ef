// Key side and value side for bf16 pages and queries: products of bf16 pairs, in float32 sums (vdpbf16ps).
//
//   K panel  [dim / 2][64 positions][2]
//   V panel  [32][width][2 positions]
#include <algorithm>
#include <cstring>

#include "attention/ahead.h"
#include "attention/rows.h"
#include "attention/sides_avx512.h"
#include "runtime/unrolled.h"

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

// Calls body(pair, vector) with each pair of dims of the block's 16 positions, and prefetches a line of a
// later block with each: many lines at once would delay other loads.
template <class Body>
OCTAVO_INLINE void for_key_pairs(const PageLayout& layout, const Tile& tile, int b, Body body) {
  const int64_t row_bytes = layout.k.row_bytes;
  const uint8_t* from = k_codes(layout, tile.blocks[b].base, tile.blocks[b].offset);
  const Ahead ahead(layout, tile, b, kDistance);
  for (int64_t byte = 0; byte < row_bytes; byte += 64) {
    const int64_t count = std::min<int64_t>(32, (row_bytes - byte) / 2);
    const __mmask32 valid = ~uint32_t(0) >> (32 - count);
    __m512i pairs[16];
#pragma GCC unroll 16
    for (int t = 0; t < 16; ++t) pairs[t] = _mm512_maskz_loadu_epi16(valid, from + t * row_bytes + byte);
    transpose16(pairs);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      ahead.prefetch_line(int(byte / 4) + i);
      body(int(byte / 4) + i, pairs[i]);
    }
  }
}

void load_keys(const PageLayout& layout, const Tile& tile, __m512i* panel) {
  for (int b = 0; b < kBlocks; ++b)
    if (tile.blocks[b].base != nullptr)
      for_key_pairs(layout, tile, b, [&](int pair, __m512i vector) __attribute__((always_inline)) {
        panel[pair * kBlocks + b] = vector;
      });
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
  const int dim = padded_dim(layout.k.dim);
  for (int b = 0; b < kBlocks; ++b) {
    if (tile.blocks[b].base == nullptr) continue;
    __m512 sums[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sums[r] = _mm512_setzero_ps();
    for_key_pairs(layout, tile, b, [&](int pair, __m512i vector) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        add_dots(sums[r], (__m512bh)vector, broadcast2(queries + r * dim + 2 * pair));
        settle(sums[r]);
      }
    });
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(scores + r * kTileTokens + 16 * b, sums[r]);
  }
}

void score(const PageLayout& layout, const Tile& tile, const void* memory, int num_rows, void* scratch,
           float* scores) {
  __m512i* const panel = static_cast<__m512i*>(scratch);
  const int dim = padded_dim(layout.k.dim);
  const uint16_t* queries = static_cast<const uint16_t*>(memory);
  if (num_rows <= kDirectRows)
    return with_rows<kDirectRows>(num_rows,
                                  [&](auto rows) { score_directly<rows()>(layout, tile, queries, scores); });
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

// Interleaves 64 bytes of two rows of V. Lane 4 c + k of vector 2 j is dim 32 j + 8 c + k, and of vector 2 j
// + 1 it is dim 32 j + 8 c + k + 4.
OCTAVO_INLINE void load_two(const uint8_t* from, int64_t row_bytes, __mmask32 first_valid,
                            __mmask32 second_valid, __m512i* to) {
  const __m512i first = _mm512_maskz_loadu_epi16(first_valid, from);
  const __m512i second = _mm512_maskz_loadu_epi16(second_valid, from + row_bytes);
  to[0] = _mm512_unpacklo_epi16(first, second);
  to[1] = _mm512_unpackhi_epi16(first, second);
}

// Returns `valid` if the position is visible: invisible rows may contain NaN, and their weight of 0 would not
// remove it.
OCTAVO_INLINE __mmask32 if_visible(const Tile& tile, int b, int position, __mmask32 valid) {
  return tile.mask(b) >> position & 1 ? valid : 0;
}

void load_values(const PageLayout& layout, const Tile& tile, __m512i* panel) {
  const int64_t row_bytes = layout.v.row_bytes;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    if (block.base == nullptr) continue;
    const uint8_t* from = v_codes(layout, block.base, block.offset);
    const Ahead ahead(layout, tile, kBlocks + b, kDistance);
    __m512i* to = panel + size_t(8 * b) * padded_dim(layout.v.dim) / 16;
    for (int pair = 0; pair < 8; ++pair, from += 2 * row_bytes) {
      ahead.prefetch_part(pair, 8);
      for (int64_t byte = 0; byte < row_bytes; byte += 64, to += 2) {
        const __mmask32 valid = ~uint32_t(0) >> (32 - std::min<int64_t>(32, (row_bytes - byte) / 2));
        load_two(from + byte, row_bytes, if_visible(tile, b, 2 * pair, valid),
                 if_visible(tile, b, 2 * pair + 1, valid), to);
      }
    }
  }
}

// A pair of positions, read from a panel.
struct PanelPairs {
  const __m512i* panel;
  int num_vectors;

  template <int kVecs>
  __attribute__((always_inline)) void load(int b, int pair, int vector, __m512i (&values)[kVecs]) const {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) values[v] = panel[size_t(8 * b + pair) * num_vectors + vector + v];
  }
};

// A pair of positions, interleaved at each read, for a few rows. The first pass prefetches later blocks.
struct PagePairs {
  const PageLayout& layout;
  const Tile& tile;
  Ahead aheads[kBlocks];

  PagePairs(const PageLayout& layout, const Tile& tile)
      : layout(layout), tile(tile), aheads{ahead_of(0), ahead_of(1), ahead_of(2), ahead_of(3)} {}

  template <int kVecs>
  __attribute__((always_inline)) void load(int b, int pair, int vector, __m512i (&values)[kVecs]) const {
    const Tile::Block& block = tile.blocks[b];
    const int64_t row_bytes = layout.v.row_bytes;
    const uint8_t* const from =
        v_codes(layout, block.base, block.offset) + 2 * pair * row_bytes + 32 * vector;
    const __mmask32 first = if_visible(tile, b, 2 * pair, ~0u),
                    second = if_visible(tile, b, 2 * pair + 1, ~0u);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; v += 2) {
      if (vector == 0) aheads[b].prefetch_part((pair * kVecs + v) / 2, 4 * kVecs);
      load_two(from + 32 * v, row_bytes, first, second, values + v);
    }
  }

 private:
  Ahead ahead_of(int b) const { return Ahead(layout, tile, kBlocks + b, kDistance); }
};

// Accumulates kVecs SIMD vectors, beginning with number `vector`. That many sums hide the products' latency.
template <int kRows, int kVecs, class Source>
OCTAVO_INLINE void accumulate_vectors(const uint16_t* weights, const Source& source, int num_vectors,
                                      int vector, uint32_t blocks, float* accumulators) {
  __m512 sums[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v)
      sums[r][v] = _mm512_loadu_ps(accumulators + (r * num_vectors + vector + v) * 16);
  for (int b = 0; b < kBlocks; ++b) {
    if (!(blocks >> b & 1)) continue;
    for (int pair = 0; pair < 8; ++pair) {
      __m512i values[kVecs];
      source.load(b, pair, vector, values);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m512bh two = broadcast2(weights + r * kTileTokens + 16 * b + 2 * pair);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) add_dots(sums[r][v], (__m512bh)values[v], two);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v)
      _mm512_storeu_ps(accumulators + (r * num_vectors + vector + v) * 16, sums[r][v]);
}

template <int kRows, int kMostVecs, class Source>
OCTAVO_INLINE void accumulate_rows(const uint16_t* weights, const Source& source, int num_vectors,
                                   uint32_t blocks, float* accumulators) {
  int vector = 0;
  if constexpr (kMostVecs == 8)
    for (; vector + 8 <= num_vectors; vector += 8)
      accumulate_vectors<kRows, 8>(weights, source, num_vectors, vector, blocks, accumulators);
  for (; vector + 4 <= num_vectors; vector += 4)
    accumulate_vectors<kRows, 4>(weights, source, num_vectors, vector, blocks, accumulators);
  for (; vector < num_vectors; vector += 2)
    accumulate_vectors<kRows, 2>(weights, source, num_vectors, vector, blocks, accumulators);
}

void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  __m512i* const panel = static_cast<__m512i*>(scratch);
  const int width = padded_dim(layout.v.dim);
  uint32_t blocks = 0;
  for (int b = 0; b < kBlocks; ++b) blocks |= uint32_t(tile.blocks[b].base != nullptr) << b;
  uint16_t* const rounded = reinterpret_cast<uint16_t*>(panel + size_t(width) * kTileTokens * 2 / 64);
  round_to_bf16(weights, num_rows * kTileTokens, rounded);
  if (num_rows <= kDirectRows && layout.v.dim % 64 == 0)
    return with_rows<kDirectRows>(num_rows, [&](auto rows) {
      accumulate_rows<rows(), rows() <= 2 ? 8 : 4>(rounded, PagePairs(layout, tile), width / 16, blocks,
                                                   accumulators);
    });
  load_values(layout, tile, panel);
  for_row_blocks(num_rows, [&]<int kRows>(int row) {
    accumulate_rows<kRows, 4>(rounded + size_t(row) * kTileTokens, PanelPairs{panel, width / 16}, width / 16,
                              blocks, accumulators + size_t(row) * width);
  });
}

// Returns the dim of float i of two vectors, see load_two.
constexpr int dim_of(int i) { return i % 16 / 4 * 8 + i / 16 * 4 + i % 4; }

}  // namespace

const KeySide bf16_keys = {query_bytes, key_panel_bytes, load_queries, score};
const ValueSide bf16_values = {padded_dim, value_panel_bytes, accumulate, to_natural<32, dim_of>};

}  // namespace octavo::OCTAVO_ISA
