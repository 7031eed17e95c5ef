// Scores over fp4, fp5 and int4 pages by products of bytes (VPMADDUBSW): queries become 8-bit fixed point of
// their row's largest, codes integers of at most kLargestValue, and their products are summed exactly. A
// row's scale is applied to its scores as one float factor.
//
// Codes are looked up as value + kLargestValue, because one factor must be unsigned; sums of 16-bit lanes
// start from what that adds, negative (`biases`), and run over kRun dims: 8 products of at most 28 * 127.
//
//   Chunks of 64 dims are 32 bytes of a row: byte i of vector j is dim 2 i + j of the chunk.
#include <algorithm>
#include <cmath>

#include "attention_ahead.h"
#include "attention_avx2.h"
#include "attention_bytes_avx2.h"
#include "attention_rows.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kLargestByte = 127;
constexpr int kRun = 2 * kChunk;
static_assert(8 * Fp5::kLargestValue * kLargestByte <= INT16_MAX && Fp5::kLargestValue > Fp4::kLargestValue);

template <class Code>
using Lookup = ByteLookup<Code, Code::kLargestValue, 1>;

// int8 rows in the order of the expanded chunks; of each row and run, 16 biases; then a factor per row.
struct Queries {
  int8_t* rows;
  int16_t* biases;
  float* factors;

  Queries(void* memory, int dim, int num_rows)
      : rows(static_cast<int8_t*>(memory)),
        biases(reinterpret_cast<int16_t*>(rows + size_t(num_rows) * dim)),
        factors(reinterpret_cast<float*>(biases + size_t(num_rows) * num_runs(dim) * 16)) {}

  static int num_runs(int dim) { return (dim + kRun - 1) / kRun; }
};

size_t query_bytes(int dim, int num_rows) { return size_t(num_rows) * (dim + 32 * Queries::num_runs(dim) + 4); }

template <class Code>
void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
  const RowFormat& format = args.layout.k;
  const int group = group_size(args), num_rows = item.num_tokens * group, dim = format.dim;
  const Queries queries(memory, dim, num_rows);
  std::fill(queries.biases, queries.biases + num_rows * Queries::num_runs(dim) * 16, int16_t(0));
  alignas(64) float row[kMaxDim];
  for (int r = 0; r < num_rows; ++r) {
    load_row(args.queries, item.first_token + r / group, item.kv_head * group + r % group, dim, row);
    if (format.rotated) hadamard(row, dim);
    float largest = 0;
    for (int d = 0; d < dim; ++d) largest = std::max(largest, std::fabs(row[d]));
    const float to_fixed = largest > 1e-30f ? kLargestByte / largest : 0.0f;
    int32_t fixed[kMaxDim];
    for (int d = 0; d < dim; ++d) fixed[d] = int32_t(std::nearbyintf(row[d] * to_fixed));
    for (int d = 0; d < dim; d += kChunk) {
      int8_t* const to = queries.rows + size_t(r) * dim + d;
      int16_t* const biases = queries.biases + (size_t(r) * Queries::num_runs(dim) + d / kRun) * 16;
      for (int i = 0; i < 32; ++i) to[i] = int8_t(fixed[d + 2 * i]), to[32 + i] = int8_t(fixed[d + 2 * i + 1]);
      for (int lane = 0; lane < 16; ++lane) {
        const int32_t* four = fixed + d + 4 * lane;
        biases[lane] = int16_t(biases[lane] - (four[0] + four[1] + four[2] + four[3]) * Code::kLargestValue);
      }
    }
    queries.factors[r] = largest / (kLargestByte * Code::kScale);
  }
}

size_t key_panel_bytes(int dim) { return size_t(dim) * 16; }

// Where 16 rows of codes (or, expanded, of bytes) lie, and their scales or planes of lowest bits.
struct Keys {
  const uint8_t* codes;
  int64_t stride;
  const uint8_t* planes;
  int64_t plane_stride;

  Keys operator+(int rows) const { return {codes + rows * stride, stride, planes + rows * plane_stride, plane_stride}; }
};

// sums[r * kKeys + key]: 16-bit lanes of the products of kRows rows and kKeys keys over kChunks chunks from d on.
template <class Code, int kRows, int kKeys, int kChunks, bool kExpanded>
OCTAVO_INLINE void multiply(const Lookup<Code>& lookup, const Queries& queries, int first, int dim, int d,
                            const Keys& keys, __m256i (&sums)[kRows * kKeys]) {
  const int8_t* rows = queries.rows + size_t(first) * dim + d;
  const int16_t* biases = queries.biases + (size_t(first) * Queries::num_runs(dim) + d / kRun) * 16;
#pragma GCC unroll 4
  for (int key = 0; key < kKeys; ++key) {
    __m256i of_key[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) of_key[r] = load256(biases + r * Queries::num_runs(dim) * 16);
#pragma GCC unroll 2
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int at = d + chunk * kChunk;
      const uint8_t* from = keys.codes + key * keys.stride + (kExpanded ? at : at / 2);
      __m256i bytes[2];
      if (kExpanded) bytes[0] = load256(from), bytes[1] = load256(from + 32);
      else lookup.expand(load256(from), plane_bytes<Code>(keys.planes + key * keys.plane_stride, at), bytes[0], bytes[1]);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j)
          of_key[r] = _mm256_add_epi16(
              of_key[r], _mm256_maddubs_epi16(bytes[j], load256(rows + r * dim + chunk * kChunk + 32 * j)));
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sums[r * kKeys + key] = of_key[r];
  }
}

// Sums of the sixteen lanes of each of four vectors.
OCTAVO_INLINE __m128i reduce4(const __m256i* sums) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i wide[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) wide[i] = _mm256_madd_epi16(sums[i], ones);
  const __m256i four = _mm256_hadd_epi32(_mm256_hadd_epi32(wide[0], wide[1]), _mm256_hadd_epi32(wide[2], wide[3]));
  return _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
}

// Four sums to scores: of one row and four keys, or of two rows and two keys.
template <int kKeys>
OCTAVO_INLINE void finish(__m128i sums, const float* factors, const float* scales, float* scores) {
  const __m128 values = _mm_cvtepi32_ps(sums);
  if constexpr (kKeys == 4) {
    _mm_storeu_ps(scores, _mm_mul_ps(values, _mm_mul_ps(_mm_set1_ps(*factors), _mm_loadu_ps(scales))));
  } else {
    const __m128 of_rows = _mm_setr_ps(factors[0], factors[0], factors[1], factors[1]);
    const __m128 of_keys = _mm_setr_ps(scales[0], scales[1], scales[0], scales[1]);
    const __m128 products = _mm_mul_ps(values, _mm_mul_ps(of_rows, of_keys));
    _mm_storel_pi(reinterpret_cast<__m64*>(scores), products);
    _mm_storeh_pi(reinterpret_cast<__m64*>(scores + kTileTokens), products);
  }
}

template <class Code, int kRows, int kKeys, bool kExpanded>
OCTAVO_INLINE void score_keys(const Lookup<Code>& lookup, const Queries& queries, int first, int dim,
                              const Keys& keys, const float* scales, float* scores) {
  constexpr int kFours = kRows * kKeys / 4;
  __m128i totals[kFours];
#pragma GCC unroll 2
  for (int i = 0; i < kFours; ++i) totals[i] = _mm_setzero_si128();
  for (int d = 0; d < dim; d += kRun) {
    __m256i sums[kRows * kKeys];
    if (dim - d >= kRun) multiply<Code, kRows, kKeys, 2, kExpanded>(lookup, queries, first, dim, d, keys, sums);
    else multiply<Code, kRows, kKeys, 1, kExpanded>(lookup, queries, first, dim, d, keys, sums);
#pragma GCC unroll 2
    for (int i = 0; i < kFours; ++i) totals[i] = _mm_add_epi32(totals[i], reduce4(sums + 4 * i));
  }
#pragma GCC unroll 2
  for (int i = 0; i < kFours; ++i) {
    const int row = first + i * 4 / kKeys;
    finish<kKeys>(totals[i], queries.factors + row, scales, scores + size_t(row) * kTileTokens);
  }
}

template <class Code, int kRows, int kKeys, bool kExpanded>
OCTAVO_INLINE void score_rows(const Lookup<Code>& lookup, const Queries& queries, int first, int dim, const Keys& keys,
                              const Ahead& ahead, const float (&scales)[16], float* scores) {
  for (int key = 0; key < 16; key += kKeys) {
    if (first == 0) Ahead::ask(ahead, key / kKeys, 16 / kKeys);
    score_keys<Code, kRows, kKeys, kExpanded>(lookup, queries, first, dim, keys + key, scales + key, scores + key);
  }
}

template <class Code, bool kExpanded>
void score_block(const Lookup<Code>& lookup, const Queries& queries, int num_rows, int dim, const Keys& keys,
                 const Ahead& ahead, const float (&scales)[16], float* scores) {
  int row = 0;
  for (; row + 4 <= num_rows; row += 4)
    score_rows<Code, 4, 2, kExpanded>(lookup, queries, row, dim, keys, ahead, scales, scores);
  for (; row + 2 <= num_rows; row += 2)
    score_rows<Code, 2, 4, kExpanded>(lookup, queries, row, dim, keys, ahead, scales, scores);
  for (; row < num_rows; ++row)
    score_rows<Code, 1, 4, kExpanded>(lookup, queries, row, dim, keys, ahead, scales, scores);
}

template <class Code>
void expand_keys(const Lookup<Code>& lookup, const Keys& keys, int dim, uint8_t* panel) {
  for (int key = 0; key < 16; ++key)
    for (int d = 0; d < dim; d += kChunk, panel += kChunk) {
      __m256i low, high;
      lookup.expand(load256(keys.codes + key * keys.stride + d / 2),
                    plane_bytes<Code>(keys.planes + key * keys.plane_stride, d), low, high);
      store256(panel, low);
      store256(panel + 32, high);
    }
}

template <class Code>
void score(const PageLayout& layout, const Tile& tile, const void* memory, int num_rows, void* scratch,
           float* scores) {
  const RowFormat& format = layout.k;
  const Lookup<Code> lookup;
  const Queries queries(const_cast<void*>(memory), format.dim, num_rows);
  uint8_t* const panel = static_cast<uint8_t*>(scratch);
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (block.base == nullptr) continue;
    const Ahead ahead(layout, tile, 2 * kBlocks + b);
    if (next.base != nullptr) prefetch(k_scale(layout, next.base, next.offset), 16 * format.scale_bytes);
    const uint8_t* planes = k_scale(layout, block.base, block.offset);
    const Keys keys = {k_codes(layout, block.base, block.offset), format.row_bytes, planes, format.scale_bytes};
    float scales[16];
    Code::load_scales(planes, format.scale_bytes, tile.mask(b), scales);
    if (num_rows <= kDirectRows) {
      score_block<Code, false>(lookup, queries, num_rows, format.dim, keys, ahead, scales, scores + 16 * b);
      continue;
    }
    expand_keys(lookup, keys, format.dim, panel);
    score_block<Code, true>(lookup, queries, num_rows, format.dim, {panel, format.dim, planes, format.scale_bytes},
                            ahead, scales, scores + 16 * b);
  }
}

template <class Code>
constexpr KeySide sides = {query_bytes, key_panel_bytes, load_queries<Code>, score<Code>};

}  // namespace

const KeySide* byte_keys(CodeType codes) {
  return side_of<KeySide>(codes, [](auto code) { return &sides<decltype(code)>; });
}

}  // namespace octavo::OCTAVO_ISA
