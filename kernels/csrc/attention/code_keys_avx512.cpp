// Scores over pages of codes (attention/codes_avx512.h).
//
//   K panel  [dim / 4][64 positions][4]  unsigned: the codes' integers, plus kOffset
//            then, of codes with scales by groups, [groups][4 blocks] scales (and biases: [groups][2][4])
#include <algorithm>
#include <type_traits>

#include "attention/ahead.h"
#include "attention/code_queries_avx512.h"
#include "attention/rows.h"
#include "attention/tiles_amx.h"

namespace octavo::OCTAVO_ISA {
namespace {

template <class Code>
size_t key_panel_bytes(int dim) {
  return size_t(dim) * kTileTokens +
         (Code::kGroup > 0 ? size_t(num_groups<Code>(dim)) * 2 * kBlocks * 64 : 0);
}

template <class Code>
using KeyLookup =
    Lookup<std::conditional_t<Code::kBits == 8, Fp4, Code>, Code::kBits == 8 ? 12 : Code::kOffset>;

template <class Code>
constexpr int kPerWord = 8 / Code::kBits;  // vectors of a word of codes

// Words [word, word + 16) of a block's 16 rows as columns; zeros past the last of `num_words`.
OCTAVO_INLINE void load_columns_of_codes(const uint8_t* codes, int64_t stride, int word, int num_words,
                                         __m512i (&columns)[16]) {
  const __mmask16 valid = __mmask16((1u << std::min(16, num_words - word)) - 1);
#pragma GCC unroll 16
  for (int t = 0; t < 16; ++t) columns[t] = _mm512_maskz_loadu_epi32(valid, codes + t * stride + 4 * word);
  transpose16(columns);
}

// The lowest bits of a block's codes, by columns.
template <class Code>
OCTAVO_INLINE void load_key_planes(const uint8_t* of_rows, int64_t stride, __m512i* planes) {
  if constexpr (Code::kPlanes) {
    load_columns(of_rows, stride, planes);
    planes[0] = _mm512_and_si512(planes[0], _mm512_set1_epi32(int(0xffffff00)));  // that byte is the scale
  }
}

// Column `word` of codes as kPerWord vectors of the panel.
template <class Code>
OCTAVO_INLINE void expand_column(const KeyLookup<Code>& lookup, __m512i codes, const __m512i* planes,
                                 int word, __m512i (&to)[kPerWord<Code>]) {
  if constexpr (Code::kBits == 8) {
    to[0] = Code::kAffine ? codes : _mm512_xor_si512(codes, _mm512_set1_epi8(char(0x80)));
  } else if constexpr (Code::kAffine) {
    to[0] = low_nibbles(codes);
    to[1] = high_nibbles(codes);
  } else {
    __m512i spread = codes;
    if constexpr (Code::kPlanes) {  // byte word % 4 of each lane, four times
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
  const int dim = layout.k.dim, num_words = dim * Code::kBits / 32, groups = num_groups<Code>(dim);
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
    if constexpr (Code::kGroup > 0) {
      __m512* const scales = reinterpret_cast<__m512*>(panel + size_t(dim) * kBlocks / 4) + b;
      load_group_scales<Code>(of_rows, layout.k.scale_bytes, groups, tile.mask(b), scales, kBlocks);
    }
    for (int word = 0; word < num_words; word += 16) {
      __m512i columns[16];
      load_columns_of_codes(codes, layout.k.row_bytes, word, num_words, columns);
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

// The sum of a row's products of both parts.
template <class Code>
OCTAVO_INLINE __m512i join_parts(__m512i high, __m512i low) {
  return Code::kParts == 2 ? join(high, low) : high;
}

// Products of kRows rows with `quads` vectors of each block.
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

// Integer products of a row with 16 positions become scores.
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
    const __m512i offset = _mm512_set1_epi32(int32_t(uint32_t(queries.sums[first + r]) * Code::kOffset));
    const __m512 factor = _mm512_set1_ps(queries.factors[first + r]);
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      store_scores(_mm512_sub_epi32(join_parts<Code>(high[r][b], low[r][b]), offset), factor, scales[b],
                   scores + size_t(first + r) * kTileTokens + 16 * b);
    }
  }
}

// The same products on AMX tiles: integers, so the bits are equal.
template <class Code>
void score_tiled(const Queries<Code>& queries, int num_rows, int dim, const __m512i* panel,
                 const __m512 (&scales)[kBlocks], float* scores) {
  using Tiles = amx::ByteScores<Code::kParts>;
  alignas(64) int32_t products[2 * amx::kByteProducts];
  Tiles tiles;
  for (int first = 0; first < num_rows; first += Tiles::kRows) {
    const int count = std::min(Tiles::kRows, num_rows - first);
    tiles.multiply(queries.bytes + size_t(first) * Code::kParts * dim, count, dim, panel, products);
    for (int r = first; r < first + count; ++r) {
      const int32_t* const from = products + (r - first) * kTileTokens;
      const __m512i offset = _mm512_set1_epi32(int32_t(uint32_t(queries.sums[r]) * Code::kOffset));
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

// Where a row of queries over codes with groups begins.
template <class Code>
struct QueryRow {
  const float *factors, *group_sums;
  const int32_t* starts;

  QueryRow(const Queries<Code>& queries, int row, int dim)
      : factors(queries.factors + size_t(row) * num_factors<Code>(dim)),
        group_sums(queries.group_sums + (Code::kAffine ? size_t(row) * num_groups<Code>(dim) : 0)),
        starts(queries.sums + size_t(row) * num_steps<Code>(dim)) {}

  // total += products of a step that began with its start, by the scales of 16 positions; after the last step
  // of a group of affine codes, the group's sum by biases, which lie `to_bias` further on
  __attribute__((always_inline)) void add(int step, __m512i high, __m512i low, const __m512* scales,
                                          int to_bias, __m512& total) const {
    constexpr int kSteps = Code::kGroup / kStep<Code>;  // of a group
    __m512 product;
    if constexpr (kOwnFactors<Code>) {
      const __m512 factor = _mm512_set1_ps(factors[step]), magic = _mm512_set1_ps(-kMagic * factors[step]);
      product = _mm512_fmadd_ps(_mm512_castsi512_ps(high), factor, magic);
    } else {
      product = _mm512_cvtepi32_ps(join_parts<Code>(high, low));
    }
    total = _mm512_fmadd_ps(product, *scales, total);
    if (Code::kAffine && step % kSteps == kSteps - 1)
      total = _mm512_fmadd_ps(_mm512_set1_ps(group_sums[step / kSteps]), scales[to_bias], total);
  }
  __m512 finish(__m512 total) const {
    return kOwnFactors<Code> ? total : _mm512_mul_ps(total, _mm512_set1_ps(*factors));
  }
};

// The same where groups of dims have scales of their own.
template <class Code, int kRows>
OCTAVO_INLINE void score_groups(const Queries<Code>& queries, int first, int dim, const __m512i* panel,
                                float* scores) {
  constexpr int kQuads = kStep<Code> / 4, kPer = Code::kAffine ? 2 : 1, kSteps = Code::kGroup / kStep<Code>;
  const int steps = num_steps<Code>(dim);
  const __m512* scales = reinterpret_cast<const __m512*>(panel + size_t(dim) * kBlocks / 4);
  const int8_t* from = queries.bytes + size_t(first) * Code::kParts * dim;
  __m512 total[kRows][kBlocks];
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) total[r][b] = _mm512_setzero_ps();
#pragma GCC unroll 1
  for (int step = 0; step < steps; ++step, from += kStep<Code>, panel += kQuads * kBlocks) {
    __m512i high[kRows][kBlocks], low[kRows][kBlocks];
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      const QueryRow<Code> row(queries, first + r, dim);
      const __m512i start = _mm512_set1_epi32(row.starts[step]);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        low[r][b] = start;
        high[r][b] = Code::kParts == 2 ? _mm512_setzero_si512() : start;
      }
    }
    add_quads<Code, kRows>(from, dim, panel, kQuads, high, low);
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      const QueryRow<Code> row(queries, first + r, dim);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b)
        row.add(step, high[r][b], low[r][b], scales + b, kBlocks, total[r][b]);
    }
    if (step % kSteps == kSteps - 1) scales += kPer * kBlocks;
  }
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r) {
    const QueryRow<Code> row(queries, first + r, dim);
    float* const to = scores + size_t(first + r) * kTileTokens;
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) _mm512_storeu_ps(to + 16 * b, row.finish(total[r][b]));
  }
}

constexpr int kDirectRows = 4;  // up to so many rows multiply what they read; more share a panel
constexpr int kDistance = 8;    // blocks between what is read and what is prefetched

// A few rows over K as it is transposed, without a panel: the same integers, and the same floats of them.
template <class Code, int kRows>
void score_directly(const PageLayout& layout, const Tile& tile, const Queries<Code>& queries, float* scores) {
  constexpr int kStepWords = kStep<Code> * Code::kBits / 32;
  constexpr int kPer = Code::kAffine ? 2 : 1;
  const KeyLookup<Code> lookup;
  const int dim = layout.k.dim, num_words = dim * Code::kBits / 32, groups = num_groups<Code>(dim);
  __m512i planes[kMaxDim / 32];
  __m512 scales[Code::kGroup > 0 ? kPer * kMaxDim / std::max(1, Code::kGroup) : 1];
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (block.base == nullptr) continue;
    const uint8_t* const codes = k_codes(layout, block.base, block.offset);
    const uint8_t* const of_rows = k_scale(layout, block.base, block.offset);
    const Ahead ahead(layout, tile, b + kDistance);
    if (next.base != nullptr) prefetch(k_scale(layout, next.base, next.offset), 16 * layout.k.scale_bytes);
    load_key_planes<Code>(of_rows, layout.k.scale_bytes, planes);
    if constexpr (Code::kGroup > 0)
      load_group_scales<Code>(of_rows, layout.k.scale_bytes, groups, tile.mask(b), scales, 1);
    else scales[0] = load_row_scales<Code>(of_rows, layout.k.scale_bytes, tile.mask(b));
    __m512i high[kRows], low[kRows];
    __m512 total[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) high[r] = low[r] = _mm512_setzero_si512(), total[r] = _mm512_setzero_ps();
    for (int word = 0; word < num_words; word += 16) {
      __m512i columns[16];
      load_columns_of_codes(codes, layout.k.row_bytes, word, num_words, columns);
      const int8_t* from = queries.bytes + word * 4 * kPerWord<Code>;
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        if (word + i >= num_words) break;
        ahead.prefetch_line(word + i);  // as many words as lines
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
        if constexpr (Code::kGroup > 0) {
          if ((i + 1) % kStepWords != 0) continue;
          const int step = (word + i) / kStepWords, g = step * kStep<Code> / Code::kGroup;
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const QueryRow<Code> row(queries, r, dim);
            __m512i& last = Code::kParts == 2 ? low[r] : high[r];
            if constexpr (Code::kOffset != 0 || kOwnFactors<Code>)
              last = _mm512_add_epi32(last, _mm512_set1_epi32(row.starts[step]));
            row.add(step, high[r], low[r], scales + g * kPer, 1, total[r]);
            high[r] = low[r] = _mm512_setzero_si512();
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      float* const to = scores + r * kTileTokens + 16 * b;
      if constexpr (Code::kGroup > 0) {
        _mm512_storeu_ps(to, QueryRow<Code>(queries, r, dim).finish(total[r]));
      } else {
        const __m512 factor = _mm512_set1_ps(queries.factors[r]);
        const __m512i offset = _mm512_set1_epi32(int32_t(uint32_t(queries.sums[r]) * Code::kOffset));
        store_scores(_mm512_sub_epi32(join_parts<Code>(high[r], low[r]), offset), factor, scales[0], to);
      }
    }
  }
}

template <class Code>
void score(const PageLayout& layout, const Tile& tile, const void* memory, int num_rows, void* scratch,
           float* scores) {
  __m512i* const panel = static_cast<__m512i*>(scratch);
  const int dim = layout.k.dim;
  const Queries<Code> queries(const_cast<void*>(memory), dim, num_rows);
  switch (num_rows) {
    case 1: return score_directly<Code, 1>(layout, tile, queries, scores);
    case 2: return score_directly<Code, 2>(layout, tile, queries, scores);
    case 3: return score_directly<Code, 3>(layout, tile, queries, scores);
    case kDirectRows: return score_directly<Code, kDirectRows>(layout, tile, queries, scores);
    default: break;
  }
  load_keys<Code>(layout, tile, panel);
  if constexpr (Code::kGroup > 0) {
    const auto body = [&]<int kRows>(int row) {
      score_groups<Code, kRows>(queries, row, dim, panel, scores);
    };
    if constexpr (Code::kParts == 1) for_row_blocks(num_rows, body);
    else for_pairs_of_rows(num_rows, body);
  } else {
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
}

template <class Code>
constexpr KeySide sides = {query_bytes<Code>, key_panel_bytes<Code>, load_queries<Code>, score<Code>};

}  // namespace

const KeySide* code_keys(const AttendArgs& args) {
  const RowFormat& format = args.layout.k;
  const bool bytes = by_bytes(args);
  switch (format.codes) {
    case CodeType::fp4: return bytes ? &sides<InBytes<Fp4>> : &sides<Fp4>;
    case CodeType::fp5: return bytes ? &sides<InBytes<Fp5>> : &sides<Fp5>;
    case CodeType::int4: return bytes ? &sides<InBytes<Int4>> : &sides<Int4>;
    case CodeType::int8: return format.dim <= 512 ? &sides<Int8> : nullptr;  // sums stay below 2^31
    case CodeType::mxfp4: return bytes ? &sides<InBytes<Mxfp4>> : &sides<Mxfp4>;
    case CodeType::nvfp4: return bytes ? &sides<InBytes<Nvfp4>> : &sides<Nvfp4>;
    case CodeType::affine4: return bytes ? &sides<InBytes<Affine4>> : &sides<Affine4>;
    case CodeType::affine8: return &sides<Affine8>;
    default: return nullptr;
  }
}

}  // namespace octavo::OCTAVO_ISA
