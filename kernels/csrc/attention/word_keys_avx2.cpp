// Scores over fp4, fp5 and int4 pages by 16-bit integer products (VPMADDWD), exact: twice the values of E2M1
// are integers of at most 12, four times those of E2M2 of at most 28. Queries become 15-bit fixed point of
// their row's largest, far finer than bf16, and a row's scale is applied to its scores as one float factor.
//
//   Chunks of 64 dims are 32 bytes of a row: lane i of vector j is dim 4 i + j of the chunk.
#include <algorithm>
#include <cmath>

#include "attention/rows.h"
#include "attention/sides_avx2.h"
#include "attention/words_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

// int16 rows in the order of the expanded chunks; then a factor and an offset per row.

struct Queries {
  int16_t* rows;
  float* factors;
  uint32_t* offsets;

  Queries(void* memory, int dim, int num_rows)
      : rows(static_cast<int16_t*>(memory)),
        factors(reinterpret_cast<float*>(rows + size_t(num_rows) * dim)),
        offsets(reinterpret_cast<uint32_t*>(factors + num_rows)) {}
};

size_t query_bytes(int dim, int num_rows) { return size_t(num_rows) * (2 * dim + 8); }

template <class Code>
void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
  const RowFormat& format = args.layout.k;
  const int group = group_size(args), num_rows = item.num_tokens * group, dim = format.dim;
  const Queries queries(memory, dim, num_rows);
  alignas(64) float row[kMaxDim];
  for (int r = 0; r < num_rows; ++r) {
    load_row(args.queries, item.first_token + r / group, item.kv_head * group + r % group, dim, row);
    if (format.rotated) hadamard(row, dim);
    float largest = 0;
    for (int d = 0; d < dim; ++d) largest = std::max(largest, std::fabs(row[d]));
    const float to_fixed = largest > 1e-30f ? kLargestFixed / largest : 0.0f;
    int16_t* const to = queries.rows + size_t(r) * dim;
    uint32_t sum = 0;
    for (int i = 0; i < dim; ++i) {
      const int from = i / kChunk * kChunk + i % 16 * 4 + i % kChunk / 16;
      to[i] = int16_t(std::nearbyintf(row[from] * to_fixed));
      sum += uint32_t(int32_t(to[i]));
    }
    queries.factors[r] = largest / (kLargestFixed * Code::kScale);
    queries.offsets[r] = sum * kWordOffset<Code>;
  }
}

size_t key_panel_bytes(int dim) { return size_t(dim) * 2 * 16; }

// Sums of the eight lanes of each of four vectors.
OCTAVO_INLINE __m128i reduce4(const __m256i (&sums)[4]) {
  const __m256i four =
      _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
  return _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
}

// Where 16 rows of codes (or, expanded, of lanes) lie, and their scales or planes of lowest bits.
struct Keys {
  const uint8_t* codes;
  int64_t stride;
  const uint8_t* planes;
  int64_t plane_bytes;
};

// scores of kRows rows against four keys
template <class Code, int kRows, bool kExpanded>
OCTAVO_INLINE void score_four(const WordLookup<Code>& lookup, const Queries& queries, int first, int dim,
                              const Keys& keys, const float* scales, float* scores) {
  __m256i sums[kRows][4];
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r)
    for (int key = 0; key < 4; ++key) sums[r][key] = _mm256_setzero_si256();
  const int16_t* rows = queries.rows + size_t(first) * dim;
  for (int d = 0; d < dim; d += kChunk) {
#pragma GCC unroll 4
    for (int key = 0; key < 4; ++key) {
      const uint8_t* from = keys.codes + key * keys.stride + (kExpanded ? 2 * d : d / 2);
      __m256i lanes[4];
      if (kExpanded)
        for (int j = 0; j < 4; ++j) lanes[j] = load256(from + 32 * j);
      else lookup.expand(load256(from), low_bits<Code>(keys.planes + key * keys.plane_bytes, d), lanes);
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j)
          sums[r][key] = _mm256_add_epi32(sums[r][key],
                                          _mm256_madd_epi16(lanes[j], load256(rows + r * dim + d + 16 * j)));
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
    const __m128i exact =
        _mm_sub_epi32(reduce4(sums[r]), _mm_set1_epi32(int32_t(queries.offsets[first + r])));
    const __m128 product = _mm_mul_ps(_mm_cvtepi32_ps(exact), _mm_set1_ps(queries.factors[first + r]));
    _mm_storeu_ps(scores + size_t(first + r) * kTileTokens, _mm_mul_ps(product, _mm_loadu_ps(scales)));
  }
}

template <class Code, bool kExpanded>
void score_block(const WordLookup<Code>& lookup, const Queries& queries, int num_rows, int dim,
                 const Keys& keys, const float (&scales)[16], float* scores) {
  for (int key = 0; key < 16; key += 4) {
    const Keys four = {keys.codes + key * keys.stride, keys.stride, keys.planes + key * keys.plane_bytes,
                       keys.plane_bytes};
    int row = 0;
    for (; row + 2 <= num_rows; row += 2)
      score_four<Code, 2, kExpanded>(lookup, queries, row, dim, four, scales + key, scores + key);
    if (row < num_rows)
      score_four<Code, 1, kExpanded>(lookup, queries, row, dim, four, scales + key, scores + key);
  }
}

template <class Code>
void expand_keys(const WordLookup<Code>& lookup, const Keys& keys, int dim, uint8_t* panel) {
  for (int key = 0; key < 16; ++key)
    for (int d = 0; d < dim; d += kChunk, panel += 2 * kChunk) {
      __m256i lanes[4];
      lookup.expand(load256(keys.codes + key * keys.stride + d / 2),
                    low_bits<Code>(keys.planes + key * keys.plane_bytes, d), lanes);
      for (int j = 0; j < 4; ++j) store256(panel + 32 * j, lanes[j]);
    }
}

template <class Code>
void score(const PageLayout& layout, const Tile& tile, const void* memory, int num_rows, void* scratch,
           float* scores) {
  const RowFormat& format = layout.k;
  const WordLookup<Code> lookup;
  const Queries queries(const_cast<void*>(memory), format.dim, num_rows);
  uint8_t* const panel = static_cast<uint8_t*>(scratch);
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (block.base == nullptr) continue;
    if (next.base != nullptr) {
      prefetch(k_codes(layout, next.base, next.offset), 16 * format.row_bytes);
      prefetch(k_scale(layout, next.base, next.offset), 16 * format.scale_bytes);
    }
    const uint8_t* planes = k_scale(layout, block.base, block.offset);
    const Keys keys = {k_codes(layout, block.base, block.offset), format.row_bytes, planes,
                       format.scale_bytes};
    float scales[16];
    Code::load_scales(planes, format.scale_bytes, tile.mask(b), scales);
    if (num_rows <= kDirectRows) {
      score_block<Code, false>(lookup, queries, num_rows, format.dim, keys, scales, scores + 16 * b);
      continue;
    }
    expand_keys(lookup, keys, format.dim, panel);
    const Keys expanded = {panel, 4 * format.row_bytes, planes, format.scale_bytes};
    score_block<Code, true>(lookup, queries, num_rows, format.dim, expanded, scales, scores + 16 * b);
  }
}

template <class Code>
constexpr KeySide sides = {query_bytes, key_panel_bytes, load_queries<Code>, score<Code>};

}  // namespace

const KeySide* word_keys(CodeType codes) {
  return side_of<KeySide>(codes, [](auto code) { return &sides<decltype(code)>; });
}

}  // namespace octavo::OCTAVO_ISA
