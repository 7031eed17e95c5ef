// Scores over fp4, fp5 and int4 pages by products of bytes (VPMADDUBSW). Queries become 8-bit fixed point
// relative to the row's largest element, and codes become integers of at most kLargestValue. Products are
// summed exactly. A key row's scale multiplies its scores as one float factor.
//
// Codes are looked up as value + kLargestValue, because VPMADDUBSW needs one unsigned factor. Sums start from
// minus the offset's contribution (`Queries::biases`) and stay in 16-bit lanes for kRun dims.
//
//   Chunks of 64 dims are 32 bytes of a row: byte i of vector j is dim 2 i + j of the chunk.
#include "attention/byte_queries_avx2.h"
#include "attention/bytes_avx2.h"
#include "attention/key_sums_avx2.h"
#include "attention/rows.h"
#include "attention/sides_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

template <class Code>
using Lookup = ByteLookup<Code, Code::kLargestValue, 1>;

// Dims summed in 16-bit lanes before widening: a lane adds 8 products of at most 28 * 127.
constexpr int kRun = 2 * kChunk;
static_assert(8 * Fp5::kLargestValue * kLargestByte <= INT16_MAX && Fp5::kLargestValue > Fp4::kLargestValue);

// Queries in memory: int8 rows in the keys' order of dims, 16 biases for each row and run, a factor per row.
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

size_t query_bytes(int dim, int num_rows) {
  return size_t(num_rows) * (dim + 32 * Queries::num_runs(dim) + 4);
}

template <class Code>
void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
  const int num_rows = item.num_tokens * group_size(args), dim = args.layout.k.dim;
  const Queries queries(memory, dim, num_rows);
  std::fill(queries.biases, queries.biases + num_rows * Queries::num_runs(dim) * 16, int16_t(0));
  alignas(32) int32_t fixed[kMaxDim];
  for (int r = 0; r < num_rows; ++r) {
    const float largest = fix_query(args, item, r, kLargestByte, fixed);
    for (int d = 0; d < dim; d += kChunk) {
      const __m256i first = as_bytes(fixed + d), second = as_bytes(fixed + d + kChunk / 2);
      int8_t* const to = queries.rows + size_t(r) * dim + d;
      const __m256i byte = _mm256_set1_epi16(255);
      const __m256i even = _mm256_packus_epi16(_mm256_and_si256(first, byte), _mm256_and_si256(second, byte));
      const __m256i odd = _mm256_packus_epi16(_mm256_srli_epi16(first, 8), _mm256_srli_epi16(second, 8));
      store256(to, _mm256_permute4x64_epi64(even, 0xd8));
      store256(to + kChunk / 2, _mm256_permute4x64_epi64(odd, 0xd8));
      const __m256i sums =
          _mm256_permute4x64_epi64(_mm256_packs_epi32(sums_of_four(first), sums_of_four(second)), 0xd8);
      int16_t* const biases = queries.biases + (size_t(r) * Queries::num_runs(dim) + d / kRun) * 16;
      const __m256i taken_off = _mm256_mullo_epi16(sums, _mm256_set1_epi16(Code::kLargestValue));
      store256(biases, _mm256_sub_epi16(load256(biases), taken_off));
    }
    queries.factors[r] = largest / (kLargestByte * Code::kScale);
  }
}

size_t key_panel_bytes(int) { return 0; }

// Adjacent rows of codes, with their scales or planes of lowest bits.
struct Keys {
  const uint8_t *codes, *planes;
  int64_t plane_stride;
};

// Returns eight sums, each over the sixteen lanes of one vector.
template <class Code>
OCTAVO_INLINE __m256i reduce(const __m256i (&sums)[kSums]) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i two[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256i a = sums[2 * i], b = sums[2 * i + 1];
    if constexpr (16 * Code::kLargestValue * kLargestByte <= INT16_MAX) {
      const __m256i both = _mm256_add_epi16(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
      two[i] = _mm256_madd_epi16(both, ones);
    } else {
      const __m256i wide_a = _mm256_madd_epi16(a, ones), wide_b = _mm256_madd_epi16(b, ones);
      two[i] = _mm256_add_epi32(_mm256_unpacklo_epi32(wide_a, wide_b), _mm256_unpackhi_epi32(wide_a, wide_b));
    }
  }
  const __m256i low =
      _mm256_add_epi32(_mm256_unpacklo_epi64(two[0], two[1]), _mm256_unpackhi_epi64(two[0], two[1]));
  const __m256i high =
      _mm256_add_epi32(_mm256_unpacklo_epi64(two[2], two[3]), _mm256_unpackhi_epi64(two[2], two[3]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                          _mm256_permute2x128_si256(low, high, 0x31));
}

// Computes sums[r * kKeys + key], kKeys = 8 / kRows, over kChunks chunks, of which the first begins at dim d.
// Each key is expanded once for all rows.
template <class Code, int kRows, int kChunks>
OCTAVO_INLINE void multiply_codes(const Lookup<Code>& lookup, const int8_t* rows, int dim, int d,
                                  const Keys& keys, const uint8_t* ahead, __m256i (&sums)[kSums]) {
  constexpr int kKeys = kSums / kRows;
#pragma GCC unroll 8
  for (int key = 0; key < kKeys; ++key) {
    forget(rows);  // makes the compiler reload rows, which is free, instead of keeping them in registers
    const int at = (key * dim + d) / 2;
    __builtin_prefetch(ahead + at);
#pragma GCC unroll 2
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      __m256i bytes[2];
      lookup.expand(load256(keys.codes + at + chunk * kChunk / 2),
                    plane_bytes<Code>(keys.planes + key * keys.plane_stride, d + chunk * kChunk), bytes[0],
                    bytes[1]);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j)
          add_products(sums[r * kKeys + key], bytes[j], load256(rows + r * dim + chunk * kChunk + 32 * j));
    }
  }
}

// Adds up fixed-point scores over kChunks chunks, beginning at dim d. Lanes are [kRows rows][8 / kRows keys].
template <class Code, int kRows, int kChunks>
OCTAVO_INLINE __m256i multiply(const Lookup<Code>& lookup, const Queries& queries, int first, int dim, int d,
                               const Keys& keys, const uint8_t* ahead) {
  const int8_t* rows = queries.rows + size_t(first) * dim + d;
  const int16_t* biases = queries.biases + (size_t(first) * Queries::num_runs(dim) + d / kRun) * 16;
  __m256i sums[kSums];
#pragma GCC unroll 8
  for (int i = 0; i < kSums; ++i) sums[i] = load256(biases + i * kRows / kSums * Queries::num_runs(dim) * 16);
  multiply_codes<Code, kRows, kChunks>(lookup, rows, dim, d, keys, ahead, sums);
  return reduce<Code>(sums);
}

// Scores a block's 16 keys for kRows rows. Rows have kDim dims, or `any_dim` dims if kDim is 0.
template <class Code, int kDim, int kRows>
OCTAVO_INLINE void score_rows(const Lookup<Code>& lookup, const Queries& queries, int first, int any_dim,
                              Keys keys, const uint8_t* ahead, const float (&scales)[16], float* scores) {
  constexpr int kKeys = kSums / kRows;
  const int dim = kDim > 0 ? kDim : any_dim, stride = dim / 2;
  const __m256 factors = spread_rows<kRows>(queries.factors + first);
  scores += size_t(first) * kTileTokens;
  for (int key = 0; key < 16; key += kKeys) {
    __m256i total = _mm256_setzero_si256();
    for (int d = 0; d < dim; d += kRun)
      total = _mm256_add_epi32(
          total, dim - d >= kRun ? multiply<Code, kRows, 2>(lookup, queries, first, dim, d, keys, ahead)
                                 : multiply<Code, kRows, 1>(lookup, queries, first, dim, d, keys, ahead));
    const __m256 units = _mm256_mul_ps(factors, spread_keys<kRows>(scales + key));
    store_scores<kRows>(_mm256_mul_ps(_mm256_cvtepi32_ps(total), units), scores + key);
    keys.codes += kKeys * stride, keys.planes += kKeys * keys.plane_stride, ahead += kKeys * stride;
  }
}

template <class Code, int kDim>
void score_dims(const PageLayout& layout, const Tile& tile, const Queries& queries, int num_rows,
                float* scores) {
  const RowFormat& format = layout.k;
  const Lookup<Code> lookup;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    if (block.base == nullptr) continue;
    const Tile::Block& soon = tile.next[b].base != nullptr ? tile.next[b] : block;
    const uint8_t* const ahead = k_codes(layout, soon.base, soon.offset);
    prefetch(k_scale(layout, soon.base, soon.offset), 16 * format.scale_bytes);
    const Keys keys = {k_codes(layout, block.base, block.offset), k_scale(layout, block.base, block.offset),
                       format.scale_bytes};
    float scales[16];
    load_scales<Code>(keys.planes, format.scale_bytes, tile.mask(b), scales);
    for_rows(num_rows, [&](int row, auto rows) {
      score_rows<Code, kDim, rows()>(lookup, queries, row, format.dim, keys, ahead, scales, scores + 16 * b);
    });
  }
}

template <class Code>
void score(const PageLayout& layout, const Tile& tile, const void* memory, int num_rows, void*,
           float* scores) {
  const int dim = layout.k.dim;
  const Queries queries(const_cast<void*>(memory), dim, num_rows);
  const auto run = dim == 64    ? score_dims<Code, 64>
                   : dim == 128 ? score_dims<Code, 128>
                                : score_dims<Code, 0>;
  run(layout, tile, queries, num_rows, scores);
}

template <class Code>
constexpr KeySide sides = {query_bytes, key_panel_bytes, load_queries<Code>, score<Code>};

}  // namespace

const KeySide* byte_keys(CodeType codes) {
  return side_of<KeySide>(codes, [](auto code) { return &sides<decltype(code)>; });
}

}  // namespace octavo::OCTAVO_ISA
