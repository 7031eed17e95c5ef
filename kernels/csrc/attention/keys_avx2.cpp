// Scores over pages of codes by integer products. Queries become fixed point relative to the row's largest
// element, codes become integers, and a key row's scale multiplies its scores as one float factor.
//
// fp4, fp5 and int4: 8-bit queries, products of bytes (VPMADDUBSW), summed exactly. Codes are looked up as
// value + kLargestValue, because VPMADDUBSW needs one unsigned factor. Sums start from minus the offset's
// contribution (`Queries::biases`) and stay in 16-bit lanes for kRun dims.
//
//   Chunks of 64 dims are 32 bytes of a row: byte i of vector j is dim 2 i + j of the chunk.
//
// int8: 15-bit queries, products of 16-bit words (VPMADDWD), summed exactly over a chunk of dims, and as
// floats over chunks.
#include <algorithm>
#include <cstring>

#include "attention/codes_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kSums = 8;  // sums reduced together: kRows rows times 8 / kRows keys

// Returns eight sums, each over the eight lanes of one vector.
OCTAVO_INLINE __m256 reduce(const __m256 (&sums)[kSums]) {
  __m256 two[4], four[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    two[i] = _mm256_add_ps(_mm256_unpacklo_ps(sums[2 * i], sums[2 * i + 1]),
                           _mm256_unpackhi_ps(sums[2 * i], sums[2 * i + 1]));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    four[i] = _mm256_add_ps(_mm256_shuffle_ps(two[2 * i], two[2 * i + 1], 0x44),
                            _mm256_shuffle_ps(two[2 * i], two[2 * i + 1], 0xee));
  return _mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20),
                       _mm256_permute2f128_ps(four[0], four[1], 0x31));
}

// Loads one number per row into the lanes of all keys.
template <int kRows>
OCTAVO_INLINE __m256 spread_rows(const float* of_rows) {
  float all[kSums];
  for (int i = 0; i < kSums; ++i) all[i] = of_rows[i * kRows / kSums];
  return _mm256_loadu_ps(all);
}

// Loads one number per key into the lanes of all rows.
template <int kRows>
OCTAVO_INLINE __m256 spread_keys(const float* of_keys) {
  if constexpr (kRows == 1) return _mm256_loadu_ps(of_keys);
  if constexpr (kRows == 2) return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(of_keys));
  return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(of_keys)));
}

template <int kRows>
OCTAVO_INLINE void store_scores(__m256 values, float* scores) {
  float all[kSums];
  _mm256_storeu_ps(all, values);
  for (int r = 0; r < kRows; ++r)
    std::memcpy(scores + r * kTileTokens, all + r * kSums / kRows, 4 * kSums / kRows);
}

// Packs 32 integers as bytes.
OCTAVO_INLINE __m256i as_bytes(const int32_t* fixed) {
  __m256i eight[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) eight[i] = _mm256_and_si256(load256(fixed + 8 * i), _mm256_set1_epi32(255));
  const __m256i fours =
      _mm256_packus_epi16(_mm256_packus_epi32(eight[0], eight[1]), _mm256_packus_epi32(eight[2], eight[3]));
  return _mm256_permutevar8x32_epi32(fours, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// Returns the sums of every four adjacent signed bytes.
OCTAVO_INLINE __m256i sums_of_four(__m256i bytes) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
}

template <class Code>
constexpr int kLargestFixed = kWords<Code> ? kLargestWord : kLargestByte;
template <class Code>
using Lookup = ByteLookup<Code, Code::kLargestValue, 1>;

// Dims summed in 16-bit lanes before widening: a lane adds 8 products of at most 28 * 127.
constexpr int kRun = 2 * kChunk;
static_assert(8 * Fp5::kLargestValue * kLargestByte <= INT16_MAX && Fp5::kLargestValue > Fp4::kLargestValue);

static_assert(int64_t(kChunk) / 8 * 128 * kLargestWord <= INT32_MAX);

// Queries in memory: rows in the keys' order of dims, of bytes also 16 biases for each row and run, and a
// factor per row.
template <class Code>
struct Queries {
  using Fixed = std::conditional_t<kWords<Code>, int16_t, int8_t>;
  Fixed* rows;
  int16_t* biases;
  float* factors;

  Queries(void* memory, int dim, int num_rows)
      : rows(static_cast<Fixed*>(memory)),
        biases(reinterpret_cast<int16_t*>(rows + size_t(num_rows) * dim)),
        factors(reinterpret_cast<float*>(biases + size_t(num_rows) * num_runs(dim) * 16)) {}

  static int num_runs(int dim) { return kWords<Code> ? 0 : (dim + kRun - 1) / kRun; }
  static size_t bytes(int dim, int num_rows) {
    return size_t(num_rows) * (sizeof(Fixed) * dim + 32 * num_runs(dim) + 4);
  }
};

template <class Code>
void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
  const int num_rows = item.num_tokens * group_size(args), dim = args.layout.k.dim;
  const Queries<Code> queries(memory, dim, num_rows);
  std::fill_n(queries.biases, num_rows * queries.num_runs(dim) * 16, int16_t(0));
  alignas(64) float row[kMaxDim];
  alignas(32) int32_t fixed[kMaxDim];
  for (int r = 0; r < num_rows; ++r) {
    load_query(args, item, r, row);
    const float largest = fix_elements(row, dim, kLargestFixed<Code>, fixed);
    queries.factors[r] = largest / (kLargestFixed<Code> * Code::kScale);
    if constexpr (kWords<Code>) {
      std::copy_n(fixed, dim, queries.rows + size_t(r) * dim);
      continue;
    }
    for (int d = 0; d < dim; d += kChunk) {
      const __m256i first = as_bytes(fixed + d), second = as_bytes(fixed + d + kChunk / 2);
      auto* const to = queries.rows + size_t(r) * dim + d;
      const __m256i byte = _mm256_set1_epi16(255);
      const __m256i even = _mm256_packus_epi16(_mm256_and_si256(first, byte), _mm256_and_si256(second, byte));
      const __m256i odd = _mm256_packus_epi16(_mm256_srli_epi16(first, 8), _mm256_srli_epi16(second, 8));
      store256(to, _mm256_permute4x64_epi64(even, 0xd8));
      store256(to + kChunk / 2, _mm256_permute4x64_epi64(odd, 0xd8));
      const __m256i sums =
          _mm256_permute4x64_epi64(_mm256_packs_epi32(sums_of_four(first), sums_of_four(second)), 0xd8);
      int16_t* const biases = queries.biases + (size_t(r) * queries.num_runs(dim) + d / kRun) * 16;
      const __m256i taken_off = _mm256_mullo_epi16(sums, _mm256_set1_epi16(Code::kLargestValue));
      store256(biases, _mm256_sub_epi16(load256(biases), taken_off));
    }
  }
}

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
OCTAVO_INLINE __m256i multiply(const Lookup<Code>& lookup, const Queries<Code>& queries, int first, int dim,
                               int d, const Keys& keys, const uint8_t* ahead) {
  const int8_t* rows = queries.rows + size_t(first) * dim + d;
  const int16_t* biases = queries.biases + (size_t(first) * queries.num_runs(dim) + d / kRun) * 16;
  __m256i sums[kSums];
#pragma GCC unroll 8
  for (int i = 0; i < kSums; ++i) sums[i] = load256(biases + i * kRows / kSums * queries.num_runs(dim) * 16);
  multiply_codes<Code, kRows, kChunks>(lookup, rows, dim, d, keys, ahead, sums);
  return reduce<Code>(sums);
}

// Computes fixed-point scores from words. Lanes are [kRows rows][8 / kRows keys].
template <class Code, int kRows>
OCTAVO_INLINE __m256 multiply_words(const Queries<Code>& queries, int first, int dim, const uint8_t* keys,
                                    const uint8_t* ahead) {
  constexpr int kKeys = kSums / kRows, kVectors = kChunk / 16;
  __m256 sums[kSums];
#pragma GCC unroll 8
  for (int i = 0; i < kSums; ++i) sums[i] = _mm256_setzero_ps();
  for (int d = 0; d < dim; d += kChunk) {
    const auto* rows = queries.rows + size_t(first) * dim + d;
#pragma GCC unroll 8
    for (int key = 0; key < kKeys; ++key) {
      const int at = key * dim + d;
      if (first == 0) __builtin_prefetch(ahead + at);
      __m256i words[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j)
        words[j] =
            _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(keys + at + 16 * j)));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        __m256i exact = _mm256_madd_epi16(words[0], load256(rows + r * dim));
#pragma GCC unroll 4
        for (int j = 1; j < kVectors; ++j)
          exact = _mm256_add_epi32(exact, _mm256_madd_epi16(words[j], load256(rows + r * dim + 16 * j)));
        __m256& to = sums[r * kKeys + key];
        to = _mm256_add_ps(to, _mm256_cvtepi32_ps(exact));
      }
    }
  }
  return reduce(sums);
}

// Scores a block's 16 keys for kRows rows. Rows have kDim dims, or `any_dim` dims if kDim is 0.
template <class Code, int kDim, int kRows>
OCTAVO_INLINE void score_rows(const Lookup<Code>& lookup, const Queries<Code>& queries, int first,
                              int any_dim, Keys keys, const uint8_t* ahead, const float (&scales)[16],
                              float* scores) {
  constexpr int kKeys = kSums / kRows;
  const int dim = kDim > 0 ? kDim : any_dim, stride = dim * Code::kBits / 8;
  const __m256 factors = spread_rows<kRows>(queries.factors + first);
  scores += size_t(first) * kTileTokens;
  for (int key = 0; key < 16; key += kKeys) {
    __m256 total;
    if constexpr (kWords<Code>) {
      total = multiply_words<Code, kRows>(queries, first, dim, keys.codes, ahead);
    } else {
      __m256i exact = _mm256_setzero_si256();
      for (int d = 0; d < dim; d += kRun)
        exact = _mm256_add_epi32(
            exact, dim - d >= kRun ? multiply<Code, kRows, 2>(lookup, queries, first, dim, d, keys, ahead)
                                   : multiply<Code, kRows, 1>(lookup, queries, first, dim, d, keys, ahead));
      total = _mm256_cvtepi32_ps(exact);
    }
    const __m256 units = _mm256_mul_ps(factors, spread_keys<kRows>(scales + key));
    store_scores<kRows>(_mm256_mul_ps(total, units), scores + key);
    keys.codes += kKeys * stride, keys.planes += kKeys * keys.plane_stride, ahead += kKeys * stride;
  }
}

template <class Code, int kDim>
void score_dims(const PageLayout& layout, const Tile& tile, const Queries<Code>& queries, int num_rows,
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
  const Queries<Code> queries(const_cast<void*>(memory), dim, num_rows);
  const auto run = dim == 64    ? score_dims<Code, 64>
                   : dim == 128 ? score_dims<Code, 128>
                                : score_dims<Code, 0>;
  run(layout, tile, queries, num_rows, scores);
}

template <class Code>
constexpr KeySide sides = {Queries<Code>::bytes, [](int) { return size_t(0); }, load_queries<Code>,
                           score<Code>};

}  // namespace

const KeySide* special_key_side(const AttendArgs& args) {
  const RowFormat& format = args.layout.k;
  if (!takes_integers(args, format)) return nullptr;
  return integer_side(format.codes, [](auto code) { return &sides<decltype(code)>; });
}

}  // namespace octavo::OCTAVO_ISA
