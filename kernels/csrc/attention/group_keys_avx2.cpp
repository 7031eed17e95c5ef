// Scores over mxfp4, nvfp4 and affine4 pages by products of bytes (VPMADDUBSW): queries become 8-bit fixed
// point, products of 8 dims are summed exactly, and a group's scale is applied to these sums as a float
// factor.
//
// Rows of these pages are not rotated: a large dim would leave the others of a query few steps. So each 16
// dims have a factor of their own.
//
// Codes of E2M1 are looked up as value + kLargestValue, because one factor must be unsigned; what that adds
// is taken off the sums (`Queries::shifts`). Biases of affine4 multiply the sum of a chunk's queries.
//
//   Chunks of 64 dims are 32 bytes of a row: byte i of vector j is dim 2 i + j of the chunk.
#include "attention/byte_queries_avx2.h"
#include "attention/group_codes_avx2.h"
#include "attention/key_sums_avx2.h"
#include "attention/sides_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kLanes8 = 8;  // of a chunk, eight dims each
constexpr int kMaxChunks = kMaxDim / kChunk;

template <class Code>
constexpr int kShift = Code::kBias ? 0 : Code::kLargestValue;

template <class Code>
using Lookup = ByteLookup<Code, kShift<Code>, 1>;

// int8 rows in the order of the expanded chunks; of each row and chunk by lane the factors, and the shifts
// that their products are taken off, and the sum of its values.
template <class Code>
struct Queries {
  int8_t* rows;
  float *factors, *shifts, *sums;

  Queries(void* memory, int dim, int num_rows)
      : rows(static_cast<int8_t*>(memory)),
        factors(reinterpret_cast<float*>(rows + size_t(num_rows) * dim)),
        shifts(factors + size_t(num_rows) * dim / kChunk * kLanes8),
        sums(shifts + size_t(num_rows) * dim / kChunk * kLanes8) {}
};

size_t query_bytes(int dim, int num_rows) {
  return size_t(num_rows) * (dim + dim / kChunk * 4 * (2 * kLanes8 + 1));
}

template <class Code>
void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
  const int num_rows = item.num_tokens * group_size(args), dim = args.layout.k.dim, chunks = dim / kChunk;
  const Queries<Code> queries(memory, dim, num_rows);
  alignas(32) int32_t fixed[kMaxDim];
  float factors[kMaxDim / kFactorDims];
  for (int r = 0; r < num_rows; ++r) {
    fix_query_in_parts(args, item, r, fixed, factors);
    for (int c = 0; c < chunks; ++c) {
      const int32_t* const of_chunk = fixed + c * kChunk;
      const size_t at = size_t(r) * chunks + c;
      store_chunk(of_chunk, queries.rows + at * kChunk);
      float total = 0;
      for (int lane = 0; lane < kLanes8; ++lane) {
        const float factor = factors[(c * kChunk + 8 * lane) / kFactorDims];
        int32_t sum = 0;
        for (int i = 0; i < 8; ++i) sum += of_chunk[8 * lane + i];
        total += float(sum) * factor;
        queries.factors[at * kLanes8 + lane] = factor * (1.0f / Code::kScale);
        queries.shifts[at * kLanes8 + lane] = float(-sum * kShift<Code>) * factor * (1.0f / Code::kScale);
      }
      queries.sums[at] = total;
    }
  }
}

size_t key_panel_bytes(int dim) { return size_t(dim) * 16; }

// Scales and biases of a block's 16 keys.
struct Scales {
  __m256 of_dims[16 * kMaxChunks];  // [keys][chunks], see Code::scales
  float biases[kMaxChunks * 16];    // [chunks][keys]
};

// Keys that are not seen have scales too, and scores that nobody looks at.
template <class Code>
OCTAVO_INLINE void load_scales(const uint8_t* from, int64_t stride, int chunks, Scales& to) {
  for (int key = 0; key < 16; ++key, from += stride) {
    float scales[kMaxChunks], biases[kMaxChunks];
    if constexpr (Code::kBias) Code::row_scales(from, chunks, scales, biases);
    for (int c = 0; c < chunks; ++c) {
      if constexpr (Code::kBias)
        to.of_dims[key * chunks + c] = _mm256_set1_ps(scales[c]), to.biases[c * 16 + key] = biases[c];
      else to.of_dims[key * chunks + c] = Code::scales(from, c);
    }
  }
}

// Products of the bytes of a chunk, those of four dims in each 16-bit lane.
OCTAVO_INLINE __m256i products_of_four(const __m256i (&bytes)[2], const int8_t* row) {
  return _mm256_add_epi16(_mm256_maddubs_epi16(bytes[0], load256(row)),
                          _mm256_maddubs_epi16(bytes[1], load256(row + kChunk / 2)));
}

// sums[r * kKeys + key], kKeys = 8 / kRows, of chunk c: `keys` are codes, or bytes if kExpanded.
template <class Code, int kRows, bool kExpanded>
OCTAVO_INLINE void multiply(const Lookup<Code>& lookup, const Queries<Code>& queries, int first, int dim,
                            int c, const uint8_t* keys, const __m256* scales, const uint8_t* ahead,
                            __m256 (&sums)[kSums]) {
  constexpr int kKeys = kSums / kRows;
  const int chunks = dim / kChunk;
  const __m256i ones = _mm256_set1_epi16(1);
  const int8_t* rows = queries.rows + size_t(first) * dim + c * kChunk;
  const float* const factors = queries.factors + (size_t(first) * chunks + c) * kLanes8;
  const int64_t to_shifts = queries.shifts - queries.factors;
#pragma GCC unroll 8
  for (int key = 0; key < kKeys; ++key) {
    forget(rows);  // to read rows again costs nothing, to keep them costs registers
    __m256i bytes[2];
    if constexpr (kExpanded) {
      const uint8_t* from = keys + key * dim + c * kChunk;
      bytes[0] = load256(from), bytes[1] = load256(from + kChunk / 2);
    } else {
      const int at = (key * dim + c * kChunk) / 2;
      __builtin_prefetch(ahead + at);
      lookup.expand(load256(keys + at), _mm256_setzero_si256(), bytes[0], bytes[1]);
    }
    const __m256 scale = scales[key * chunks + c];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m256i sum = _mm256_madd_epi16(products_of_four(bytes, rows + r * dim), ones);
      const float* const of_row = factors + r * chunks * kLanes8;
      const __m256 factor = _mm256_loadu_ps(of_row);
      __m256 product = _mm256_cvtepi32_ps(sum);
      if constexpr (kShift<Code> == 0) product = _mm256_mul_ps(product, factor);
      else product = _mm256_fmadd_ps(product, factor, _mm256_loadu_ps(of_row + to_shifts));
      __m256& to = sums[r * kKeys + key];
      to = _mm256_fmadd_ps(product, scale, to);
    }
  }
}
static_assert(4 * 2 * Fp4::kLargestValue * kLargestByte <= INT16_MAX &&
              4 * Affine4::kLargestValue * kLargestByte <= INT16_MAX);

// A block's 16 keys against kRows rows; kDim 0: `any_dim` dims.
template <class Code, int kDim, int kRows, bool kExpanded>
OCTAVO_INLINE void score_rows(const Lookup<Code>& lookup, const Queries<Code>& queries, int first,
                              int any_dim, const uint8_t* keys, const uint8_t* ahead, const Scales& scales,
                              float* scores) {
  constexpr int kKeys = kSums / kRows;
  const int dim = kDim > 0 ? kDim : any_dim, chunks = dim / kChunk, stride = kExpanded ? dim : dim / 2;
  scores += size_t(first) * kTileTokens;
  for (int key = 0; key < 16; key += kKeys) {
    __m256 sums[kSums];
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) sums[i] = _mm256_setzero_ps();
    for (int c = 0; c < chunks; ++c)
      multiply<Code, kRows, kExpanded>(lookup, queries, first, dim, c, keys + key * stride,
                                       scales.of_dims + key * chunks, ahead + key * stride, sums);
    __m256 total = reduce(sums);
    if constexpr (Code::kBias)
      for (int c = 0; c < chunks; ++c)
        total = _mm256_fmadd_ps(spread_keys<kRows>(scales.biases + c * 16 + key),
                                spread_rows<kRows>(queries.sums + size_t(first) * chunks + c, chunks), total);
    store_scores<kRows>(total, scores + key);
  }
}

template <class Code, int kDim, bool kExpanded>
void score_block(const Lookup<Code>& lookup, const Queries<Code>& queries, int num_rows, int dim,
                 const uint8_t* keys, const uint8_t* ahead, const Scales& scales, float* scores) {
  int row = 0;
  for (; row + 4 <= num_rows; row += 4)
    score_rows<Code, kDim, 4, kExpanded>(lookup, queries, row, dim, keys, ahead, scales, scores);
  for (; row + 2 <= num_rows; row += 2)
    score_rows<Code, kDim, 2, kExpanded>(lookup, queries, row, dim, keys, ahead, scales, scores);
  if (row < num_rows)
    score_rows<Code, kDim, 1, kExpanded>(lookup, queries, row, dim, keys, ahead, scales, scores);
}

template <class Code>
void expand_keys(const Lookup<Code>& lookup, const uint8_t* codes, int dim, uint8_t* panel) {
  for (int from = 0; from < 16 * dim; from += kChunk, panel += kChunk) {
    __m256i low, high;
    lookup.expand(load256(codes + from / 2), _mm256_setzero_si256(), low, high);
    store256(panel, low);
    store256(panel + kChunk / 2, high);
  }
}

template <class Code, int kDim>
void score_dims(const PageLayout& layout, const Tile& tile, const Queries<Code>& queries, int num_rows,
                uint8_t* panel, float* scores) {
  const RowFormat& format = layout.k;
  const Lookup<Code> lookup;
  Scales scales;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    if (block.base == nullptr) continue;
    const Tile::Block& soon = tile.next[b].base != nullptr ? tile.next[b] : block;
    const uint8_t* const ahead = k_codes(layout, soon.base, soon.offset);
    prefetch(k_scale(layout, soon.base, soon.offset), 16 * format.scale_bytes);
    const uint8_t* const codes = k_codes(layout, block.base, block.offset);
    load_scales<Code>(k_scale(layout, block.base, block.offset), format.scale_bytes, format.dim / kChunk,
                      scales);
    if (num_rows <= kDirectRows) {
      score_block<Code, kDim, false>(lookup, queries, num_rows, format.dim, codes, ahead, scales,
                                     scores + 16 * b);
      continue;
    }
    prefetch(ahead, 16 * format.row_bytes);
    expand_keys<Code>(lookup, codes, format.dim, panel);
    score_block<Code, kDim, true>(lookup, queries, num_rows, format.dim, panel, ahead, scales,
                                  scores + 16 * b);
  }
}

template <class Code>
void score(const PageLayout& layout, const Tile& tile, const void* memory, int num_rows, void* scratch,
           float* scores) {
  const int dim = layout.k.dim;
  const Queries<Code> queries(const_cast<void*>(memory), dim, num_rows);
  const auto run = dim == 64    ? score_dims<Code, 64>
                   : dim == 128 ? score_dims<Code, 128>
                                : score_dims<Code, 0>;
  run(layout, tile, queries, num_rows, static_cast<uint8_t*>(scratch), scores);
}

template <class Code>
constexpr KeySide sides = {query_bytes, key_panel_bytes, load_queries<Code>, score<Code>};

}  // namespace

const KeySide* group_keys(CodeType codes) {
  return group_side_of<KeySide>(codes, [](auto code) { return &sides<decltype(code)>; });
}

}  // namespace octavo::OCTAVO_ISA
