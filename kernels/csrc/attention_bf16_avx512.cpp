// bf16 pages under bf16 queries: products of bf16 pairs, summed in float32 (vdpbf16ps).
//
//   K panel  [dim / 2][64 positions][2]
//   V panel  [32][width][2 positions]
#include <algorithm>
#include <cstring>

#include "attention_avx512.h"
#include "attention_rows.h"

namespace octavo::OCTAVO_ISA {
namespace {

OCTAVO_INLINE __m512bh broadcast2(const void* from) {
  int32_t two;
  std::memcpy(&two, from, 4);
  return (__m512bh)_mm512_set1_epi32(two);
}

int padded_dim(int dim) { return (dim + 31) / 32 * 32; }

// Where each block of the next tile starts, for K or for V. Its lines are fetched one by one between the
// products of the first rows: a tile is too long for the few misses a core can have under way at once.
struct Ahead {
  const uint8_t* blocks[kBlocks];

  // Without a next tile, fetch from `idle`, which is at hand.
  Ahead(const Tile& tile, int64_t codes, int64_t row_bytes, const void* idle) {
    for (int b = 0; b < kBlocks; ++b) {
      const Tile::Block& block = tile.next[b];
      blocks[b] = block.base != nullptr ? block.base + codes + block.offset * row_bytes
                                        : static_cast<const uint8_t*>(idle);
    }
  }
};

OCTAVO_INLINE void prefetch_line(const uint8_t* from) {
  _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T0);
}

// ---- queries: rows of padded_dim bf16 values, zeros past dim ----

size_t query_bytes(int dim, int num_rows) { return size_t(num_rows) * padded_dim(dim) * 2; }

void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
  const int group = group_size(args), num_rows = item.num_tokens * group, dim = args.layout.k.dim;
  uint16_t* to = static_cast<uint16_t*>(memory);
  alignas(64) float row[kMaxDim];
  for (int r = 0; r < num_rows; ++r, to += padded_dim(dim)) {
    load_row(args.queries, item.first_token + r / group, item.kv_head * group + r % group, dim, row);
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
    for (int64_t byte = 0; byte < row_bytes; byte += 64, to += 16 * kBlocks) {
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

template <int kRows, bool kFetch>
OCTAVO_INLINE void score_rows(const uint16_t* queries, int dim, const __m512i* panel, const Ahead& ahead,
                              float* scores) {
  __m512 sums[kRows][kBlocks];
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) sums[r][b] = _mm512_setzero_ps();
  for (int d = 0; d < dim; d += 2, panel += kBlocks) {
    if (kFetch)  // a block of 16 rows has dim / 2 lines
      for (const uint8_t* block : ahead.blocks) prefetch_line(block + 32 * d);
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      const __m512bh pair = broadcast2(queries + r * dim + d);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) sums[r][b] = _mm512_dpbf16_ps(sums[r][b], (__m512bh)panel[b], pair);
    }
  }
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) _mm512_storeu_ps(scores + r * kTileTokens + 16 * b, sums[r][b]);
}

void score(const PageLayout& layout, const Tile& tile, const void* memory, int num_rows, void* scratch,
           float* scores) {
  __m512i* const panel = static_cast<__m512i*>(scratch);
  const int dim = padded_dim(layout.k.dim);
  load_keys(layout, tile, panel);
  const uint16_t* queries = static_cast<const uint16_t*>(memory);
  const Ahead ahead(tile, 0, layout.k.row_bytes, panel);
  for_row_blocks(num_rows, [&]<int kRows>(int row) {
    const uint16_t* from = queries + size_t(row) * dim;
    float* to = scores + size_t(row) * kTileTokens;
    if (row == 0) score_rows<kRows, true>(from, dim, panel, ahead, to);
    else score_rows<kRows, false>(from, dim, panel, ahead, to);
  });
}

// ---- V ----

// The panel, then the weights of each row as 64 bf16 values.
size_t value_panel_bytes(int dim, int num_rows) {
  return size_t(padded_dim(dim)) * kTileTokens * 2 + size_t(num_rows) * kTileTokens * 2;
}

// Lane 4 c + k of vectors 2 j and 2 j + 1 is dim 32 j + 8 c + k, and 4 more.
void load_values(const PageLayout& layout, const Tile& tile, __m512i* panel) {
  const int64_t row_bytes = layout.v.row_bytes;
  const int num_vectors = padded_dim(layout.v.dim) / 16;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    if (block.base == nullptr) continue;
    const uint8_t* from = v_codes(layout, block.base, block.offset);
    const uint32_t visible = tile.mask(b);
    for (int pair = 0; pair < 8; ++pair) {
      __m512i* to = panel + size_t(8 * b + pair) * num_vectors;
      for (int64_t byte = 0; byte < row_bytes; byte += 64, to += 2) {
        const int64_t count = std::min<int64_t>(32, (row_bytes - byte) / 2), at = 2 * pair * row_bytes + byte;
        const __mmask32 valid = ~uint32_t(0) >> (32 - count);
        // What no row sees may be NaN, and 0 * NaN is not 0.
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

template <int kRows, bool kFetch>
OCTAVO_INLINE void accumulate_rows(const uint16_t* weights, const __m512i* panel, int num_vectors,
                                   uint32_t blocks, const Ahead& ahead, float* accumulators) {
  for (int vector = 0; vector < num_vectors; vector += 2) {
    __m512 sums[kRows][2];
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v)
        sums[r][v] = _mm512_loadu_ps(accumulators + (r * num_vectors + vector + v) * 16);
    for (int b = 0; b < kBlocks; ++b) {
      if (!(blocks >> b & 1)) continue;
      for (int pair = 8 * b; pair < 8 * b + 8; ++pair) {
        const __m512i* values = panel + size_t(pair) * num_vectors + vector;
        if (kFetch) {  // the 16 lines of a block that belong to this pair of vectors
          const uint8_t* lines = ahead.blocks[b] + (8 * vector + pair % 8 * 2) * 64;
          prefetch_line(lines), prefetch_line(lines + 64);
        }
#pragma GCC unroll 3
        for (int r = 0; r < kRows; ++r) {
          const __m512bh two = broadcast2(weights + r * kTileTokens + 2 * pair);
#pragma GCC unroll 2
          for (int v = 0; v < 2; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], (__m512bh)values[v], two);
        }
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v)
        _mm512_storeu_ps(accumulators + (r * num_vectors + vector + v) * 16, sums[r][v]);
  }
}

void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  __m512i* const panel = static_cast<__m512i*>(scratch);
  const int width = padded_dim(layout.v.dim);
  load_values(layout, tile, panel);
  uint32_t blocks = 0;
  for (int b = 0; b < kBlocks; ++b) blocks |= uint32_t(tile.blocks[b].base != nullptr) << b;
  uint16_t* const rounded = reinterpret_cast<uint16_t*>(panel + size_t(width) * kTileTokens * 2 / 64);
  for (int i = 0; i < num_rows * kTileTokens; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded + i),
                        (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(weights + i)));
  const Ahead ahead(tile, layout.v_codes, layout.v.row_bytes, panel);
  for_row_blocks(num_rows, [&]<int kRows>(int row) {
    const uint16_t* from = rounded + size_t(row) * kTileTokens;
    float* to = accumulators + size_t(row) * width;
    if (row == 0) accumulate_rows<kRows, true>(from, panel, width / 16, blocks, ahead, to);
    else accumulate_rows<kRows, false>(from, panel, width / 16, blocks, ahead, to);
  });
}

void to_natural(int dim, const float* accumulator, float* row) {
  for (int to = 0; to < dim; to += 4) {  // the row's buffer is longer than dim
    const int chunk = to % 32 / 8, half = to / 4 % 2;
    std::memcpy(row + to, accumulator + to / 32 * 32 + half * 16 + 4 * chunk, 16);
  }
}

}  // namespace

const KeySide bf16_keys = {query_bytes, key_panel_bytes, load_queries, score};
const ValueSide bf16_values = {padded_dim, value_panel_bytes, accumulate, to_natural};

}  // namespace octavo::OCTAVO_ISA
