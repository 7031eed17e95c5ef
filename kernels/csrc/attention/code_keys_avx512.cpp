// Key sides for pages of codes (attention/codes_avx512.h).
//
//   K panel  [dim / 4][64 positions][4]  unsigned: the codes' integers, plus kLargestValue
#include <algorithm>

#include "attention/ahead.h"
#include "attention/code_queries_avx512.h"
#include "attention/rows.h"
#include "attention/tiles_amx.h"

namespace octavo::OCTAVO_ISA {
namespace {

size_t key_panel_bytes(int dim) { return size_t(dim) * kTileTokens; }

template <class Code>
using KeyLookup = Lookup<Code, Code::kLargestValue>;

template <class Code>
constexpr int kPerWord = 8 / Code::kBits;  // panel vectors from one column of 32-bit words of codes

// Loads the bit planes with the lowest bits of a block's codes, as columns.
template <class Code>
OCTAVO_INLINE void load_key_planes(const uint8_t* of_rows, int64_t stride, __m512i* planes) {
  if constexpr (Code::kPlanes) {
    for (int word = 0; 4 * word < stride; word += 16)
      load_columns(of_rows, stride, word, *reinterpret_cast<__m512i(*)[16]>(planes + word));
    planes[0] = _mm512_and_si512(planes[0], _mm512_set1_epi32(int(0xffffff00)));  // byte 0 is the scale
  }
}

// Expands column `word` of codes into kPerWord vectors of the panel.
template <class Code>
OCTAVO_INLINE void expand_column(const KeyLookup<Code>& lookup, __m512i codes, const __m512i* planes,
                                 int word, __m512i (&to)[kPerWord<Code>]) {
  if constexpr (Code::kBits == 8) {
    to[0] = _mm512_xor_si512(codes, _mm512_set1_epi8(char(0x80)));
  } else {
    __m512i spread = codes;
    if constexpr (Code::kPlanes) {  // byte word % 4 of each lane, repeated four times
      alignas(16) int8_t order[16];
      for (int lane = 0; lane < 16; ++lane) order[lane] = int8_t(lane / 4 * 4 + word % 4);
      spread = _mm512_shuffle_epi8(
          planes[word / 4], _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(order))));
    }
    lookup.expand(codes, spread, _mm512_set1_epi32(0x40100401), to[0], to[1]);
  }
}

template <class Code>
void load_keys(const PageLayout& layout, const Tile& tile, __m512i* panel) {
  const KeyLookup<Code> lookup;
  const int num_words = layout.k.dim * Code::kBits / 32;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (block.base == nullptr) continue;
    const uint8_t* const codes = k_codes(layout, block.base, block.offset);
    const uint8_t* const of_rows = k_scale(layout, block.base, block.offset);
    if (next.base != nullptr) {
      prefetch(k_codes(layout, next.base, next.offset), 16 * layout.k.row_bytes);
      prefetch(k_scale(layout, next.base, next.offset), 16 * layout.k.scale_bytes);
    }
    __m512i planes[kMaxDim / 32];
    load_key_planes<Code>(of_rows, layout.k.scale_bytes, planes);
    for (int word = 0; word < num_words; word += 16) {
      __m512i columns[16];
      load_columns(codes, layout.k.row_bytes, word, columns);
      __m512i* to = panel + size_t(word) * kPerWord<Code> * kBlocks + b;
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        if (word + i >= num_words) break;
        __m512i vectors[kPerWord<Code>];
        expand_column<Code>(lookup, columns[i], planes + word / 4, i, vectors);
        for (const __m512i& vector : vectors) *to = vector, to += kBlocks;
      }
    }
  }
}

// Returns a row's integer products: 256 times the products of high bytes plus the products of low bytes.
template <class Code>
OCTAVO_INLINE __m512i join_parts(__m512i high, __m512i low) {
  return Code::kParts == 2 ? join(high, low) : high;
}

// Multiplies kRows rows by `quads` vectors (of four dims) of each block.
template <class Code, int kRows>
OCTAVO_INLINE void add_quads(const int8_t* from, int dim, const __m512i* panel, int quads,
                             __m512i (&high)[kRows][kBlocks], __m512i (&low)[kRows][kBlocks]) {
  for (int i = 0; i < 4 * quads; i += 4, panel += kBlocks) {
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      const int8_t* row = from + r * Code::kParts * dim + i;
      const __m512i upper = broadcast4(row), lower = Code::kParts == 2 ? broadcast4(row + dim) : upper;
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        add_dots(high[r][b], panel[b], upper);
        if constexpr (Code::kParts == 2) add_dots(low[r][b], panel[b], lower);
      }
    }
  }
}

// Stores the scores of a row for 16 positions, given their integer products.
OCTAVO_INLINE void store_scores(__m512i products, __m512 factor, __m512 scales, float* to) {
  _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(products), factor), scales));
}

template <class Code, int kRows>
OCTAVO_INLINE void score_rows(const Queries<Code>& queries, int first, int dim, const __m512i* panel,
                              const __m512 (&scales)[kBlocks], float* scores) {
  __m512i high[kRows][kBlocks], low[kRows][kBlocks];
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) high[r][b] = low[r][b] = _mm512_setzero_si512();
  add_quads<Code, kRows>(queries.bytes + size_t(first) * Code::kParts * dim, dim, panel, dim / 4, high, low);
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r) {
    const __m512i offset =
        _mm512_set1_epi32(int32_t(uint32_t(queries.sums[first + r]) * Code::kLargestValue));
    const __m512 factor = _mm512_set1_ps(queries.factors[first + r]);
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      store_scores(_mm512_sub_epi32(join_parts<Code>(high[r][b], low[r][b]), offset), factor, scales[b],
                   scores + size_t(first + r) * kTileTokens + 16 * b);
    }
  }
}

// Computes the products on AMX instead; they are integers, so results are bit-identical.
template <class Code>
void score_tiled(const Queries<Code>& queries, int num_rows, int dim, const __m512i* panel,
                 const __m512 (&scales)[kBlocks], float* scores) {
  using Tiles = amx::ByteProducts<Code::kParts>;
  alignas(64) int32_t products[2 * amx::kByteProducts];
  Tiles tiles;
  for (int first = 0; first < num_rows; first += Tiles::kRows) {
    const int count = std::min(Tiles::kRows, num_rows - first);
    tiles.score(queries.bytes + size_t(first) * Code::kParts * dim, count, dim, panel, products);
    for (int r = first; r < first + count; ++r) {
      const int32_t* const from = products + (r - first) * kTileTokens;
      const __m512i offset = _mm512_set1_epi32(int32_t(uint32_t(queries.sums[r]) * Code::kLargestValue));
      const __m512 factor = _mm512_set1_ps(queries.factors[r]);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        const __m512i high = _mm512_load_si512(from + 16 * b);
        const __m512i low = Code::kParts == 2 ? _mm512_load_si512(from + amx::kByteProducts + 16 * b) : high;
        store_scores(_mm512_sub_epi32(join_parts<Code>(high, low), offset), factor, scales[b],
                     scores + size_t(r) * kTileTokens + 16 * b);
      }
    }
  }
}

// Scores a few rows while transposing K, without storing its panel. Results are bit-identical either way.
template <class Code, int kRows>
void score_directly(const PageLayout& layout, const Tile& tile, const Queries<Code>& queries, float* scores) {
  const KeyLookup<Code> lookup;
  const int dim = layout.k.dim, num_words = dim * Code::kBits / 32;
  __m512i planes[kMaxDim / 32];
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (block.base == nullptr) continue;
    const uint8_t* const codes = k_codes(layout, block.base, block.offset);
    const uint8_t* const of_rows = k_scale(layout, block.base, block.offset);
    const Ahead ahead(layout, tile, b + 2 * kBlocks);
    if (next.base != nullptr) prefetch(k_scale(layout, next.base, next.offset), 16 * layout.k.scale_bytes);
    load_key_planes<Code>(of_rows, layout.k.scale_bytes, planes);
    const __m512 scales = load_row_scales<Code>(of_rows, layout.k.scale_bytes, tile.mask(b));
    __m512i high[kRows], low[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) high[r] = low[r] = _mm512_setzero_si512();
    for (int word = 0; word < num_words; word += 16) {
      __m512i columns[16];
      load_columns(codes, layout.k.row_bytes, word, columns);
      const int8_t* from = queries.bytes + word * 4 * kPerWord<Code>;
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        if (word + i >= num_words) break;
        ahead.prefetch_line(word + i);  // a block has as many words per row as it has cache lines
        __m512i vectors[kPerWord<Code>];
        expand_column<Code>(lookup, columns[i], planes + word / 4, i, vectors);
#pragma GCC unroll 2
        for (int v = 0; v < kPerWord<Code>; ++v, from += 4)
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            add_dots(high[r], vectors[v], broadcast4(from + r * Code::kParts * dim));
            if constexpr (Code::kParts == 2)
              add_dots(low[r], vectors[v], broadcast4(from + r * 2 * dim + dim));
          }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m512 factor = _mm512_set1_ps(queries.factors[r]);
      const __m512i offset = _mm512_set1_epi32(int32_t(uint32_t(queries.sums[r]) * Code::kLargestValue));
      store_scores(_mm512_sub_epi32(join_parts<Code>(high[r], low[r]), offset), factor, scales,
                   scores + r * kTileTokens + 16 * b);
    }
  }
}

template <class Code>
void score(const PageLayout& layout, const Tile& tile, const void* memory, int num_rows, void* scratch,
           float* scores) {
  const int dim = layout.k.dim;
  const Queries<Code> queries(const_cast<void*>(memory), dim, num_rows);
  switch (num_rows) {
    case 1: return score_directly<Code, 1>(layout, tile, queries, scores);
    case 2: return score_directly<Code, 2>(layout, tile, queries, scores);
    case 3: return score_directly<Code, 3>(layout, tile, queries, scores);
    case kDirectRows: return score_directly<Code, kDirectRows>(layout, tile, queries, scores);
    default: break;
  }
  __m512i* const panel = static_cast<__m512i*>(scratch);
  load_keys<Code>(layout, tile, panel);
  __m512 scales[kBlocks];
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    scales[b] = block.base == nullptr ? _mm512_setzero_ps()
                                      : load_row_scales<Code>(k_scale(layout, block.base, block.offset),
                                                              layout.k.scale_bytes, tile.mask(b));
  }
  if (takes_tiles<Code>(num_rows) && dim % 64 == 0)
    return score_tiled<Code>(queries, num_rows, dim, panel, scales, scores);
  for_row_blocks(num_rows, [&]<int kRows>(int row) {
    score_rows<Code, kRows>(queries, row, dim, panel, scales, scores);
  });
}

// Most dims of int8 rows whose products, with the offset, add up to less than 2^31.
constexpr int kMostInt8Dims = 512;
static_assert(int64_t(Queries<Int8>::kLargest) * 127 * kMostInt8Dims <= INT32_MAX);
static_assert(int64_t(Queries<Fp5>::kLargest) * Fp5::kLargestValue * kMaxDim <= INT32_MAX);

template <class Code>
constexpr KeySide sides = {query_bytes<Code>, key_panel_bytes, load_queries<Code>, score<Code>};

}  // namespace

const KeySide* special_key_side(const AttendArgs& args) {
  if (const KeySide* side = tiled_keys(args)) return side;
  switch (args.layout.k.codes) {
    case CodeType::bf16: return args.queries.type == Float::bf16 ? &bf16_keys : nullptr;
    case CodeType::int8: return args.layout.k.dim <= kMostInt8Dims ? &sides<Int8> : nullptr;
    case CodeType::fp4: return by_bytes(args) ? &sides<Fp4> : nullptr;
    case CodeType::fp5: return by_bytes(args) ? &sides<Fp5> : nullptr;
    case CodeType::int4: return by_bytes(args) ? &sides<Int4> : nullptr;
    default: return nullptr;
  }
}

}  // namespace octavo::OCTAVO_ISA
