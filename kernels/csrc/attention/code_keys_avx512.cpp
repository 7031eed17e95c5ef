// Key sides for pages of codes (attention/codes_avx512.h). Queries are in fixed point, relative to the
// largest element of their row.
//
//   K panel  [dim / 4][64 positions][4]  unsigned: the codes' integers, plus kLargestValue
#include <algorithm>
#include <cstring>

#include "attention/ahead.h"
#include "attention/codes_avx512.h"
#include "attention/rows.h"
#include "attention/tiles_amx.h"
#include "runtime/unrolled.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Each row has `dim` high bytes and, if kParts is 2, `dim` low bytes. Then come a factor per row, and a sum
// that corrects for kLargestValue.
template <class Code>
struct Queries {
  static constexpr int kLargest = Code::kParts == 2 ? 127 * 256 + 127 : 127;  // the (high) bytes are signed
  int8_t* bytes;
  float* factors;
  int32_t* sums;

  Queries(void* memory, int dim, int num_rows)
      : bytes(static_cast<int8_t*>(memory)),
        factors(reinterpret_cast<float*>(bytes + round_up64(size_t(num_rows) * Code::kParts * dim + 16))),
        sums(reinterpret_cast<int32_t*>(factors + num_rows)) {}
};

template <class Code>
size_t query_bytes(int dim, int num_rows) {
  return round_up64(size_t(num_rows) * Code::kParts * dim + 16) + size_t(num_rows) * 8;
}

// Returns the largest magnitude of a row, which is padded with zeros to whole vectors; NaNs are ignored.
OCTAVO_INLINE float largest_of(const float* row, int dim) {
  __m512 top = _mm512_setzero_ps();
  for (int d = 0; d < dim; d += 16) top = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(row + d)), top);
  return _mm512_reduce_max_ps(top);
}

// Orders dims like the panel, which has a word's low nibbles before its high ones: 0 2 4 6, then 1 3 5 7.
template <class Code>
OCTAVO_INLINE __m128i in_panel_order(__m128i bytes) {
  if constexpr (Code::kBits == 8) return bytes;
  alignas(16) static constexpr int8_t kOrder[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
  return _mm_shuffle_epi8(bytes, _mm_load_si128(reinterpret_cast<const __m128i*>(kOrder)));
}

// Converts a row of floats, padded with zeros to whole vectors; `largest` is its largest magnitude.
template <class Code>
OCTAVO_INLINE void fix_query(const Queries<Code>& queries, int r, int dim, const float* row, float largest) {
  alignas(64) int32_t fixed[Code::kParts == 2 ? kMaxDim + 16 : 16];
  int8_t* const high = queries.bytes + size_t(r) * Code::kParts * dim;
  const __m512 to_fixed = _mm512_set1_ps(largest > 1e-30f ? float(queries.kLargest) / largest : 0.0f);
  __m512i sums = _mm512_setzero_si512();
  for (int d = 0; d < dim; d += 16) {
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(row + d), to_fixed));
    __m512i upper = rounded;
    if constexpr (Code::kParts == 2) {
      upper = _mm512_srai_epi32(_mm512_add_epi32(rounded, _mm512_set1_epi32(128)), 8);
      _mm512_store_si512(fixed + d, rounded);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + d), in_panel_order<Code>(_mm512_cvtepi32_epi8(upper)));
    sums = _mm512_add_epi32(sums, rounded);
  }
  queries.sums[r] = _mm512_reduce_add_epi32(sums);
  queries.factors[r] = largest / float(queries.kLargest) * (1.0f / Code::kScale);
  for (int d = 0; Code::kParts == 2 && d < dim; d += 16)  // low bytes last, over the padding of high bytes
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + dim + d),
                     in_panel_order<Code>(_mm512_cvtepi32_epi8(_mm512_load_si512(fixed + d))));
}

constexpr int kQueryRows = 8;  // most rows that are loaded together

// Rotates and converts several rows alternately, because the steps for one row depend on each other.
template <class Code>
void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
  constexpr int kFloats = 2 * (kMaxDim + 16);
  const int num_rows = item.num_tokens * group_size(args), dim = args.layout.k.dim;
  const int stride = dim + 16, together = std::min(kQueryRows, kFloats / stride);
  const Queries<Code> queries(memory, dim, num_rows);
  alignas(64) float rows[kFloats];
  float largest[kQueryRows];
  for (int first = 0; first < num_rows; first += together) {
    const int count = std::min(together, num_rows - first);
    for (int i = 0; i < count; ++i) {
      load_query(args, item, first + i, rows + i * stride);
      std::fill_n(rows + i * stride + dim, stride - dim, 0.0f);
    }
    for (int i = 0; i < count; ++i) largest[i] = largest_of(rows + i * stride, dim);
    for (int i = 0; i < count; ++i) fix_query(queries, first + i, dim, rows + i * stride, largest[i]);
  }
}

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

// Calls body(word, vectors) with the panel's vectors from each column of words of 16 rows of codes, in order.
template <class Code, class Body>
OCTAVO_INLINE void for_columns(const KeyLookup<Code>& lookup, const RowFormat& format, const uint8_t* codes,
                               const uint8_t* of_rows, Body body) {
  const int num_words = format.dim * Code::kBits / 32;
  __m512i planes[kMaxDim / 32];
  load_key_planes<Code>(of_rows, format.scale_bytes, planes);
  for (int word = 0; word < num_words; word += 16) {
    __m512i columns[16];
    load_columns(codes, format.row_bytes, word, columns);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (word + i >= num_words) break;
      __m512i vectors[kPerWord<Code>];
      expand_column<Code>(lookup, columns[i], planes + word / 4, i, vectors);
      body(word + i, vectors);
    }
  }
}

template <class Code>
void load_keys(const PageLayout& layout, const Tile& tile, __m512i* panel) {
  const KeyLookup<Code> lookup;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (block.base == nullptr) continue;
    if (next.base != nullptr) {
      prefetch(k_codes(layout, next.base, next.offset), 16 * layout.k.row_bytes);
      prefetch(k_scale(layout, next.base, next.offset), 16 * layout.k.scale_bytes);
    }
    __m512i* to = panel + b;
    for_columns<Code>(lookup, layout.k, k_codes(layout, block.base, block.offset),
                      k_scale(layout, block.base, block.offset),
                      [&](int, const __m512i(&vectors)[kPerWord<Code>]) __attribute__((always_inline)) {
                        for (const __m512i& vector : vectors) *to = vector, to += kBlocks;
                      });
  }
}

// Stores the scores of row r for 16 positions, given its products with high and with low bytes.
template <class Code>
OCTAVO_INLINE void store_scores(const Queries<Code>& queries, int r, __m512i high, __m512i low, __m512 scales,
                                float* to) {
  const __m512i products = Code::kParts == 2 ? join(high, low) : high;
  const __m512i offset = _mm512_set1_epi32(int32_t(uint32_t(queries.sums[r]) * Code::kLargestValue));
  const __m512 factor = _mm512_set1_ps(queries.factors[r]);
  const __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(products, offset));
  _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_mul_ps(exact, factor), scales));
}

template <class Code, int kRows>
OCTAVO_INLINE void score_rows(const Queries<Code>& queries, int first, int dim, const __m512i* panel,
                              const __m512 (&scales)[kBlocks], float* scores) {
  __m512i high[kRows][kBlocks], low[kRows][kBlocks];
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) high[r][b] = low[r][b] = _mm512_setzero_si512();
  const int8_t* const from = queries.bytes + size_t(first) * Code::kParts * dim;
  for (int i = 0; i < dim; i += 4, panel += kBlocks) {
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
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b)
      store_scores(queries, first + r, high[r][b], low[r][b], scales[b],
                   scores + size_t(first + r) * kTileTokens + 16 * b);
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
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        const __m512i high = _mm512_load_si512(from + 16 * b);
        const __m512i low = Code::kParts == 2 ? _mm512_load_si512(from + amx::kByteProducts + 16 * b) : high;
        store_scores(queries, r, high, low, scales[b], scores + size_t(r) * kTileTokens + 16 * b);
      }
    }
  }
}

// Scores a few rows while transposing K, without storing its panel. Results are bit-identical either way.
template <class Code, int kRows>
void score_directly(const PageLayout& layout, const Tile& tile, const Queries<Code>& queries, float* scores) {
  const KeyLookup<Code> lookup;
  const int dim = layout.k.dim;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (block.base == nullptr) continue;
    const uint8_t* const of_rows = k_scale(layout, block.base, block.offset);
    const Ahead ahead(layout, tile, b + 2 * kBlocks);
    if (next.base != nullptr) prefetch(k_scale(layout, next.base, next.offset), 16 * layout.k.scale_bytes);
    const __m512 scales = load_row_scales<Code>(of_rows, layout.k.scale_bytes, tile.mask(b));
    __m512i high[kRows], low[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) high[r] = low[r] = _mm512_setzero_si512();
    for_columns<Code>(lookup, layout.k, k_codes(layout, block.base, block.offset), of_rows,
                      [&](int word, const __m512i(&vectors)[kPerWord<Code>]) __attribute__((always_inline)) {
                        ahead.prefetch_line(word);  // a block has as many words per row as it has lines
                        const int8_t* from = queries.bytes + word * 4 * kPerWord<Code>;
#pragma GCC unroll 2
                        for (int v = 0; v < kPerWord<Code>; ++v, from += 4)
#pragma GCC unroll 4
                          for (int r = 0; r < kRows; ++r) {
                            add_dots(high[r], vectors[v], broadcast4(from + r * Code::kParts * dim));
                            if constexpr (Code::kParts == 2)
                              add_dots(low[r], vectors[v], broadcast4(from + r * 2 * dim + dim));
                          }
                      });
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
      store_scores(queries, r, high[r], low[r], scales, scores + r * kTileTokens + 16 * b);
  }
}

template <class Code>
void score(const PageLayout& layout, const Tile& tile, const void* memory, int num_rows, void* scratch,
           float* scores) {
  const int dim = layout.k.dim;
  const Queries<Code> queries(const_cast<void*>(memory), dim, num_rows);
  if (num_rows <= kDirectRows)
    return with_rows<kDirectRows>(
        num_rows, [&](auto rows) { score_directly<Code, rows()>(layout, tile, queries, scores); });
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
  const CodeType codes = args.layout.k.codes;
  if (codes == CodeType::bf16) return args.queries.type == Float::bf16 ? &bf16_keys : nullptr;
  if (codes == CodeType::int8 ? args.layout.k.dim > kMostInt8Dims : !by_bytes(args)) return nullptr;
  return integer_side(codes, [](auto code) { return &sides<decltype(code)>; });
}

}  // namespace octavo::OCTAVO_ISA
