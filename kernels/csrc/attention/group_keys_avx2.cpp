// Key side for nvfp4 pages: products of bytes (VPMADDUBSW). Queries become 8-bit fixed point, and products of
// 16 dims are summed exactly. Each sum is multiplied by its group's scale as a float.
//
// Rows of nvfp4 pages are not rotated, so one large dim would leave few of a byte's steps for all others. So
// every 16 dims of a query have their own factor.
//
// Codes are looked up as value + kLargestValue, because VPMADDUBSW needs one unsigned factor. Sums are
// corrected for this offset.
//
// A run is two chunks of 64 dims. If the number of chunks is odd, the last run has one.
//
//   A run of two chunks is four vectors. Their 32-bit lanes l have dims of group `group_of_lane(l)`: vectors
//   0 and 1 have the even and the odd dims of its first eight, vectors 2 and 3 those of its last eight.
//   A run of one chunk is two vectors, whose lanes l have the even and the odd dims of 8 l to 8 l + 7.
#include "attention/byte_queries_avx2.h"
#include "attention/group_codes_avx2.h"
#include "attention/key_sums_avx2.h"
#include "attention/sides_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kLanes8 = 8;
constexpr int kRun = 2 * kChunk;
constexpr int kMaxRuns = kMaxDim / kRun;

// Returns the group of a lane. Groups are permuted, because the instruction VSHUFPS works within 128 bits.
constexpr int group_of_lane(int lane) { return lane % 2 + lane / 4 * 2 + lane / 2 % 2 * 4; }

using Lookup = ByteLookup<Nvfp4, Nvfp4::kLargestValue, 1>;

inline int num_runs(int dim) { return (dim + kRun - 1) / kRun; }

// int8 rows in the order of expanded runs. Each row and run has a factor per lane, and a correction per lane
// for the codes' offset.
struct Queries {
  int8_t* rows;
  float *factors, *sums;

  Queries(void* memory, int dim, int num_rows)
      : rows(static_cast<int8_t*>(memory)),
        factors(reinterpret_cast<float*>(rows + size_t(num_rows) * dim)),
        sums(factors + size_t(num_rows) * num_runs(dim) * kLanes8) {}
};

size_t query_bytes(int dim, int num_rows) {
  return size_t(num_rows) * (dim + num_runs(dim) * 4 * 2 * kLanes8);
}

// Arranges a run of queries in the order of the keys' bytes. A group's 16 dims are four words: even and odd
// dims of the first eight, then of the last eight.
template <int kChunks>
OCTAVO_INLINE void arrange_run(const int32_t* fixed, __m256i (&to)[2 * kChunks]) {
  __m256i groups[2 * kChunks];  // each vector has one group per 128 bits
#pragma GCC unroll 4
  for (int i = 0; i < 2 * kChunks; ++i) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    groups[i] = _mm256_shuffle_epi8(as_bytes(fixed + 32 * i), _mm256_broadcastsi128_si256(order));
  }
  if constexpr (kChunks == 1) {
    const __m256 first = _mm256_castsi256_ps(groups[0]), second = _mm256_castsi256_ps(groups[1]);
    to[0] = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(first, second, 0x88)), 0xd8);
    to[1] = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xdd)), 0xd8);
  } else {
    __m256i pairs[4];  // words 0 and 1, or 2 and 3, of two groups, interleaved
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) {
      const __m256i even = _mm256_permute2x128_si256(groups[i], groups[i + 1], 0x20);
      const __m256i odd = _mm256_permute2x128_si256(groups[i], groups[i + 1], 0x31);
      pairs[i] = _mm256_unpacklo_epi32(even, odd), pairs[i + 1] = _mm256_unpackhi_epi32(even, odd);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      to[2 * i] = _mm256_unpacklo_epi64(pairs[i], pairs[2 + i]);
      to[2 * i + 1] = _mm256_unpackhi_epi64(pairs[i], pairs[2 + i]);
    }
  }
}

// Loads one number per group of a run into the groups' lanes.
template <int kChunks>
OCTAVO_INLINE __m256 spread_groups(const float* of_groups) {
  float by_lane[kLanes8];
  for (int lane = 0; lane < kLanes8; ++lane)
    by_lane[lane] = of_groups[kChunks == 2 ? group_of_lane(lane) : lane / 2];
  return _mm256_loadu_ps(by_lane);
}

// Stores run number `at` of a row: its bytes at `to`, its factors and its corrections.
template <int kChunks>
OCTAVO_INLINE void load_run(const Queries& queries, size_t at, const int32_t* fixed, const float* factors,
                            int8_t* to) {
  __m256i bytes[2 * kChunks], sums = _mm256_setzero_si256();
  arrange_run<kChunks>(fixed, bytes);
#pragma GCC unroll 4
  for (int i = 0; i < 2 * kChunks; ++i) {
    store256(to + 32 * i, bytes[i]);
    sums = _mm256_add_epi32(sums, sums_of_four(bytes[i]));
  }
  sums = _mm256_mullo_epi32(sums, _mm256_set1_epi32(-Nvfp4::kLargestValue));
  const __m256 unit = _mm256_mul_ps(spread_groups<kChunks>(factors), _mm256_set1_ps(1.0f / Nvfp4::kScale));
  _mm256_storeu_ps(queries.factors + at * kLanes8, unit);
  _mm256_storeu_ps(queries.sums + at * kLanes8, _mm256_mul_ps(_mm256_cvtepi32_ps(sums), unit));
}

void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
  const int num_rows = item.num_tokens * group_size(args), dim = args.layout.k.dim, runs = num_runs(dim);
  const Queries queries(memory, dim, num_rows);
  alignas(32) int32_t fixed[kMaxDim];
  float factors[kMaxDim / kFactorDims];
  for (int r = 0; r < num_rows; ++r) {
    fix_query_in_parts(args, item, r, fixed, factors);
    for (int run = 0; run < runs; ++run) {
      const int d = run * kRun;
      const size_t at = size_t(r) * runs + run;
      int8_t* const to = queries.rows + size_t(r) * dim + d;
      if (dim - d >= kRun) load_run<2>(queries, at, fixed + d, factors + d / kFactorDims, to);
      else load_run<1>(queries, at, fixed + d, factors + d / kFactorDims, to);
    }
  }
}

size_t key_panel_bytes(int) { return 0; }

// Scales of a block's 16 keys: [keys][runs].
struct Scales {
  __m256 of_lanes[16 * kMaxRuns];

  // Loads scales of all 16 keys, also of masked ones, whose scores are not used.
  __attribute__((always_inline)) void load(const uint8_t* from, int64_t stride, int dim) {
    const int runs = num_runs(dim), chunks = dim / kChunk;
    for (int key = 0; key < 16; ++key, from += stride) {
      for (int run = 0; run < chunks / 2; ++run) load_run<2>(from, run, key * runs + run);
      if (chunks % 2 != 0) load_run<1>(from, runs - 1, key * runs + runs - 1);
    }
  }

 private:
  template <int kChunks>
  __attribute__((always_inline)) void load_run(const uint8_t* from, int run, int at) {
    of_lanes[at] = Nvfp4::key_scales<kChunks>(from + run * 2 * kSlots);
  }
};

// Loads a run of codes, arranged for the vectors described at the top.
template <int kChunks>
OCTAVO_INLINE void expand_run(const Lookup& lookup, const uint8_t* codes, __m256i (&to)[2 * kChunks]) {
  const __m256i zero = _mm256_setzero_si256();
  if constexpr (kChunks == 1) {
    lookup.expand(load256(codes), zero, to[0], to[1]);
  } else {
    const __m256 first = _mm256_castsi256_ps(load256(codes));
    const __m256 second = _mm256_castsi256_ps(load256(codes + kChunk / 2));
    lookup.expand(_mm256_castps_si256(_mm256_shuffle_ps(first, second, 0x88)), zero, to[0], to[1]);
    lookup.expand(_mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xdd)), zero, to[2], to[3]);
  }
}

// Multiplies a run's bytes; each 16-bit lane sums four dims (a run of one chunk) or eight (two chunks).
template <int kVectors>
OCTAVO_INLINE __m256i products(const __m256i (&bytes)[kVectors], const int8_t* row) {
  __m256i sum = _mm256_maddubs_epi16(bytes[0], load256(row));
#pragma GCC unroll 4
  for (int i = 1; i < kVectors; ++i) add_products(sum, bytes[i], load256(row + 32 * i));
  return sum;
}

// Computes sums[r * kKeys + key], kKeys = 8 / kRows, over kChunks chunks, beginning at dim d.
template <int kRows, int kChunks>
OCTAVO_INLINE void multiply(const Lookup& lookup, const Queries& queries, int first, int dim, int d,
                            const uint8_t* keys, const Scales& scales, int first_key, const uint8_t* ahead,
                            __m256 (&sums)[kSums]) {
  constexpr int kKeys = kSums / kRows;
  const int runs = num_runs(dim);
  const __m256i ones = _mm256_set1_epi16(1);
  const int8_t* rows = queries.rows + size_t(first) * dim + d;
  const float* const factors = queries.factors + (size_t(first) * runs + d / kRun) * kLanes8;
  const int64_t to_sums = queries.sums - queries.factors;
#pragma GCC unroll 8
  for (int key = 0; key < kKeys; ++key) {
    forget(rows);  // makes the compiler reload rows, which is free, instead of keeping them in registers
    __m256i bytes[2 * kChunks];
    const int at = (key * dim + d) / 2;
    if (first == 0) __builtin_prefetch(ahead + at);
    expand_run<kChunks>(lookup, keys + at, bytes);
    const int of_key = (first_key + key) * runs + d / kRun;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m256i sum = _mm256_madd_epi16(products(bytes, rows + r * dim), ones);
      const float* const of_row = factors + r * runs * kLanes8;
      const __m256 factor = _mm256_loadu_ps(of_row), of_sum = _mm256_loadu_ps(of_row + to_sums);
      __m256& to = sums[r * kKeys + key];
      to = _mm256_fmadd_ps(_mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), factor, of_sum), scales.of_lanes[of_key],
                           to);
    }
  }
}
static_assert(8 * 2 * Nvfp4::kLargestValue * kLargestByte <= INT16_MAX);

// Scores a block's 16 keys for kRows rows. Rows have kDim dims, or `any_dim` dims if kDim is 0.
template <int kDim, int kRows>
OCTAVO_INLINE void score_rows(const Lookup& lookup, const Queries& queries, int first, int any_dim,
                              const uint8_t* keys, const uint8_t* ahead, const Scales& scales,
                              float* scores) {
  constexpr int kKeys = kSums / kRows;
  const int dim = kDim > 0 ? kDim : any_dim, stride = dim / 2;
  scores += size_t(first) * kTileTokens;
  for (int key = 0; key < 16; key += kKeys) {
    __m256 sums[kSums];
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) sums[i] = _mm256_setzero_ps();
    int d = 0;
    for (; d + kRun <= dim; d += kRun)
      multiply<kRows, 2>(lookup, queries, first, dim, d, keys + key * stride, scales, key,
                         ahead + key * stride, sums);
    if (d < dim)
      multiply<kRows, 1>(lookup, queries, first, dim, d, keys + key * stride, scales, key,
                         ahead + key * stride, sums);
    store_scores<kRows>(reduce(sums), scores + key);
  }
}

template <int kDim>
void score_dims(const PageLayout& layout, const Tile& tile, const Queries& queries, int num_rows,
                float* scores) {
  const RowFormat& format = layout.k;
  const Lookup lookup;
  Scales scales;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    if (block.base == nullptr) continue;
    const Tile::Block& soon = tile.next[b].base != nullptr ? tile.next[b] : block;
    const uint8_t* const ahead = k_codes(layout, soon.base, soon.offset);
    prefetch(k_scale(layout, soon.base, soon.offset), 16 * format.scale_bytes);
    const uint8_t* const codes = k_codes(layout, block.base, block.offset);
    scales.load(k_scale(layout, block.base, block.offset), format.scale_bytes, format.dim);
    for_rows(num_rows, [&](int row, auto rows) {
      score_rows<kDim, rows()>(lookup, queries, row, format.dim, codes, ahead, scales, scores + 16 * b);
    });
  }
}

void score(const PageLayout& layout, const Tile& tile, const void* memory, int num_rows, void*,
           float* scores) {
  const int dim = layout.k.dim;
  const Queries queries(const_cast<void*>(memory), dim, num_rows);
  const auto run = dim == 64 ? score_dims<64> : dim == 128 ? score_dims<128> : score_dims<0>;
  run(layout, tile, queries, num_rows, scores);
}

constexpr KeySide sides = {query_bytes, key_panel_bytes, load_queries, score};

}  // namespace

const KeySide* group_keys(CodeType codes) { return codes == CodeType::nvfp4 ? &sides : nullptr; }

}  // namespace octavo::OCTAVO_ISA
