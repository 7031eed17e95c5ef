// Scores over fp4 pages (attention_fp4_avx512.h).
//
//   K panel  [dim / 4][64 positions][4]  unsigned: twice the value, plus 12
#include <algorithm>
#include <cmath>

#include "attention_fp4_avx512.h"
#include "attention_rows.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Per row `dim` high bytes, then `dim` low bytes; then a factor and an offset per row.
struct Queries {
  int8_t* bytes;
  float* factors;
  int32_t* offsets;

  Queries(void* memory, int dim, int num_rows)
      : bytes(static_cast<int8_t*>(memory)),
        factors(reinterpret_cast<float*>(bytes + round_up64(size_t(num_rows) * 2 * dim))),
        offsets(reinterpret_cast<int32_t*>(factors + num_rows)) {}
};

size_t query_bytes(int dim, int num_rows) {
  return round_up64(size_t(num_rows) * 2 * dim) + size_t(num_rows) * 8;
}

// The panel holds dims in the order of nibbles in a word: 0 2 4 6, then 1 3 5 7.
OCTAVO_INLINE int panel_dim(int i) { return i / 8 * 8 + i % 4 * 2 + i / 4 % 2; }

void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
  const RowFormat& format = args.layout.k;
  const int group = group_size(args), num_rows = item.num_tokens * group, dim = format.dim;
  Queries queries(memory, dim, num_rows);
  alignas(64) float row[kMaxDim];
  for (int r = 0; r < num_rows; ++r) {
    load_row(args.queries, item.first_token + r / group, item.kv_head * group + r % group, dim, row);
    if (format.rotated) hadamard(row, dim);
    float largest = 0;
    for (int d = 0; d < dim; ++d) largest = std::max(largest, std::fabs(row[d]));
    // 127 * 256 + 127 leaves the high byte within a signed byte.
    const float to_fixed = largest > 1e-30f ? 32639.0f / largest : 0.0f;
    int8_t* const high = queries.bytes + size_t(r) * 2 * dim;
    int32_t sum = 0;
    for (int i = 0; i < dim; ++i) {
      const int32_t fixed = int32_t(std::nearbyintf(row[panel_dim(i)] * to_fixed));
      const int32_t upper = (fixed + 128) >> 8;
      high[i] = int8_t(upper);
      high[dim + i] = int8_t(fixed - upper * 256);
      sum += fixed;
    }
    queries.factors[r] = largest / 32639.0f * 0.5f;
    queries.offsets[r] = sum * kOffset;
  }
}

size_t key_panel_bytes(int dim) { return size_t(dim) * kTileTokens; }

void load_keys(const PageLayout& layout, const Tile& tile, __m512i* panel) {
  const __m512i lookup = table(kOffset);
  const int num_words = layout.k.dim / 8;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (block.base == nullptr) continue;
    const uint8_t* from = k_codes(layout, block.base, block.offset);
    if (next.base != nullptr) {
      prefetch(k_codes(layout, next.base, next.offset), 16 * layout.k.row_bytes);
      prefetch(k_scale(layout, next.base, next.offset), 1);
    }
    for (int word = 0; word < num_words; word += 16, from += 64) {
      const int count = std::min(16, num_words - word);
      const __mmask16 valid = __mmask16((1u << count) - 1);
      __m512i rows[16];
#pragma GCC unroll 16
      for (int t = 0; t < 16; ++t) rows[t] = _mm512_maskz_loadu_epi32(valid, from + t * layout.k.row_bytes);
      transpose16(rows);
      __m512i* to = panel + size_t(word) * 2 * kBlocks + b;
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        if (i >= count) break;
        to[2 * i * kBlocks] = _mm512_shuffle_epi8(lookup, low_nibbles(rows[i]));
        to[(2 * i + 1) * kBlocks] = _mm512_shuffle_epi8(lookup, high_nibbles(rows[i]));
      }
    }
  }
}

template <int kRows>
OCTAVO_INLINE void score_rows(const Queries& queries, int first, int dim, const __m512i* panel,
                              const __m512 (&scales)[kBlocks], float* scores) {
  __m512i high[kRows][kBlocks], low[kRows][kBlocks];
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) high[r][b] = low[r][b] = _mm512_setzero_si512();
  const int8_t* from = queries.bytes + size_t(first) * 2 * dim;
  for (int i = 0; i < dim; i += 4, panel += kBlocks) {
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      const int8_t* row = from + r * 2 * dim + i;
      const __m512i upper = broadcast4(row), lower = broadcast4(row + dim);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        high[r][b] = _mm512_dpbusd_epi32(high[r][b], panel[b], upper);
        low[r][b] = _mm512_dpbusd_epi32(low[r][b], panel[b], lower);
      }
    }
  }
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r) {
    const __m512i offset = _mm512_set1_epi32(queries.offsets[first + r]);
    const __m512 factor = _mm512_set1_ps(queries.factors[first + r]);
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      const __m512 product = _mm512_cvtepi32_ps(_mm512_sub_epi32(join(high[r][b], low[r][b]), offset));
      _mm512_storeu_ps(scores + size_t(first + r) * kTileTokens + 16 * b,
                       _mm512_mul_ps(_mm512_mul_ps(product, factor), scales[b]));
    }
  }
}

void score(const PageLayout& layout, const Tile& tile, const void* memory, int num_rows, void* scratch,
           float* scores) {
  __m512i* const panel = static_cast<__m512i*>(scratch);
  const int dim = layout.k.dim;
  load_keys(layout, tile, panel);
  __m512 scales[kBlocks];
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    scales[b] = block.base == nullptr ? _mm512_setzero_ps()
                                      : halves(k_scale(layout, block.base, block.offset), tile.mask(b));
  }
  const Queries queries(const_cast<void*>(memory), dim, num_rows);
  for_row_blocks(num_rows, [&]<int kRows>(int row) {
    score_rows<kRows>(queries, row, dim, panel, scales, scores);
  });
}

}  // namespace

const KeySide fp4_keys = {query_bytes, key_panel_bytes, load_queries, score};

}  // namespace octavo::OCTAVO_ISA
