// bf16 pages under many rows of bf16 queries: 16-bit integer products (VPMADDWD), of which this level computes
// half as many again as multiply-adds of floats. Few rows are computed in floats (attention_float.h).
//
// Rows of K and V become fixed point, kLargestValue steps to their own largest element. Queries become fixed
// point as fine as 32-bit sums over a row allow, which depends on the sum of their magnitudes, and so do, over a
// tile, softmax weights, once multiplied by what steps of V are worth. Half a step is the error of an element;
// over a row it is less than a fifth of bf16's own rounding, relative to the row's norm (kernels/README.md).
//
//   K panel  [dim / 2][16 positions][2 dims], of a block
//   V panel  [width / 16][32 pairs of positions][8 even dims, 8 odd ones][2 positions]
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention_avx2.h"
#include "attention_bytes_avx2.h"
#include "attention_panels.h"
#include "attention_rows.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kLargestValue = 16383;
constexpr int kLargestSum = INT32_MAX / kLargestValue;  // of the magnitudes of factors

// Steps to one: at most INT16_MAX to `largest`, and kLargestSum to `sum`, half a step of `count` apart for rounding.
float steps_per_unit(float largest, float sum, int count) {
  return largest > 1e-33f ? std::min(INT16_MAX / largest, float(kLargestSum - count) / sum) : 0.0f;
}

// ---- queries: int16 rows, then a factor per row ----

struct Queries {
  int16_t* rows;
  float* factors;

  Queries(const void* memory, int dim, int num_rows)
      : rows(const_cast<int16_t*>(static_cast<const int16_t*>(memory))),
        factors(reinterpret_cast<float*>(rows + size_t(num_rows) * dim)) {}
};

OCTAVO_INLINE __m256i to_words(__m256 low, __m256 high) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high));
  return _mm256_permute4x64_epi64(words, 0xd8);
}

size_t query_bytes(int dim, int num_rows) {
  return std::max(bf16_float_keys.query_bytes(dim, num_rows), size_t(num_rows) * (2 * dim + 4));
}

void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
  const int group = group_size(args), num_rows = item.num_tokens * group, dim = args.layout.k.dim;
  if (num_rows < kPanelRows) return bf16_float_keys.load_queries(args, item, memory);
  const Queries queries(memory, dim, num_rows);
  alignas(64) float row[kMaxDim];
  for (int r = 0; r < num_rows; ++r) {
    load_row(args.queries, item.first_token + r / group, item.kv_head * group + r % group, dim, row);
    float largest = 0, sum = 0;
    for (int d = 0; d < dim; ++d) largest = std::max(largest, std::fabs(row[d])), sum += std::fabs(row[d]);
    const float steps = steps_per_unit(largest, sum, dim);
    const __m256 to_fixed = _mm256_set1_ps(steps);
    for (int d = 0; d < dim; d += 16)
      store256(queries.rows + size_t(r) * dim + d, to_words(_mm256_mul_ps(_mm256_loadu_ps(row + d), to_fixed),
                                                            _mm256_mul_ps(_mm256_loadu_ps(row + d + 8), to_fixed)));
    queries.factors[r] = (steps > 0 ? 1 / steps : 0.0f) + 0 * sum;  // NaN for a row that holds one, or an infinity
  }
}

// ---- rows of pages ----

// bf16 codes as words of fixed point; returns what a step is worth.
float fix_row(const uint8_t* codes, int dim, int16_t* to) {
  __m256i top = _mm256_setzero_si256();
  for (int d = 0; d < dim; d += 16)
    top = _mm256_max_epu16(top, _mm256_and_si256(load256(codes + 2 * d), _mm256_set1_epi16(0x7fff)));
  const __m128i inverse = _mm_xor_si128(_mm_max_epu16(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1)),
                                        _mm_set1_epi16(-1));
  const uint32_t bits = uint32_t(~_mm_cvtsi128_si32(_mm_minpos_epu16(inverse)) & 0xffff) << 16;
  float largest;
  std::memcpy(&largest, &bits, 4);
  const __m256 to_fixed = _mm256_set1_ps(largest > 1e-33f ? kLargestValue / largest : 0.0f);
  for (int d = 0; d < dim; d += 16) {
    const __m256i both = load256(codes + 2 * d);
    const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int32_t(0xffff0000))));
    const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(even, to_fixed));
    const __m256i high = _mm256_slli_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(odd, to_fixed)), 16);
    store256(to + d, _mm256_blend_epi16(low, high, 0xaa));
  }
  return largest * (1.0f / kLargestValue);
}

// What a block's 16 rows are worth, 0 where no row of the item sees the position: it may hold anything.
OCTAVO_INLINE void fix_block(const uint8_t* codes, const RowFormat& format, uint32_t visible, int16_t* to, float* units) {
  for (int t = 0; t < 16; ++t) {
    const float unit = fix_row(codes + t * format.row_bytes, format.dim, to + t * format.dim);
    units[t] = visible >> t & 1 ? unit : 0.0f;
  }
}

// ---- products: sums of kRows rows and 16 lanes each ----

// sum += products of neighbouring words, in the register where sum is: with twelve sums none is to spare.
OCTAVO_INLINE void add_word_products(__m256i& sum, __m256i a, __m256i b) {
  __m256i products;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(a), "x"(b));
}

template <int kRows>
struct WordSums {
  __m256i at[2 * kRows];

  __attribute__((always_inline)) WordSums() {
    unrolled<2 * kRows>([&](auto i) __attribute__((always_inline)) { at[i] = _mm256_setzero_si256(); });
  }
  // Two words of each row, `stride` words apart, times those of the lanes.
  __attribute__((always_inline)) void add(const int16_t* of_rows, int64_t stride, const uint8_t* lanes) {
    const __m256i low = load256(lanes), high = load256(lanes + 32);
    unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
      int32_t two;
      std::memcpy(&two, of_rows + r * stride, 4);
      const __m256i words = _mm256_set1_epi32(two);
      add_word_products(at[2 * r], low, words);
      add_word_products(at[2 * r + 1], high, words);
    });
  }
};

// ---- K ----

// Rows of words, the panel, units.
size_t key_panel_bytes(int dim) { return std::max(bf16_float_keys.panel_bytes(dim), size_t(64) * dim + 64); }

template <int kRows>
__attribute__((noinline)) void score_words(const int16_t* queries, const float* factors, int dim, const uint8_t* panel,
                                           const float* units, float* scores) {
  WordSums<kRows> sums;
  for (int d = 0; d < dim; d += 2, panel += 64) sums.add(queries + d, dim, panel);
  unrolled<2 * kRows>([&](auto i) __attribute__((always_inline)) {
    const __m256 unit = _mm256_mul_ps(_mm256_loadu_ps(units + i % 2 * 8), _mm256_set1_ps(factors[i / 2]));
    _mm256_storeu_ps(scores + i / 2 * kTileTokens + i % 2 * 8, _mm256_mul_ps(_mm256_cvtepi32_ps(sums.at[i]), unit));
  });
}

void score(const PageLayout& layout, const Tile& tile, const void* memory, int num_rows, void* scratch, float* scores) {
  if (num_rows < kPanelRows) return bf16_float_keys.score(layout, tile, memory, num_rows, scratch, scores);
  const int dim = layout.k.dim;
  const Queries queries(memory, dim, num_rows);
  int16_t* const rows = static_cast<int16_t*>(scratch);
  uint8_t* const panel = reinterpret_cast<uint8_t*>(rows + 16 * dim);
  float* const units = reinterpret_cast<float*>(panel + 32 * dim);
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (block.base == nullptr) continue;
    if (next.base != nullptr) prefetch(k_codes(layout, next.base, next.offset), 16 * layout.k.row_bytes);
    fix_block(k_codes(layout, block.base, block.offset), layout.k, tile.mask(b), rows, units);
    transpose_keys(reinterpret_cast<const float*>(rows), dim / 2, reinterpret_cast<float*>(panel));
    for_tile_rows(num_rows, [&](int row, auto count) {
      score_words<count()>(queries.rows + size_t(row) * dim, queries.factors + row, dim, panel, units,
                           scores + row * kTileTokens + 16 * b);
    });
  }
}

// ---- V ----

// The panel, rows of words, units; then weights and factors of each row.
size_t value_panel_bytes(int dim, int num_rows) {
  const size_t words = size_t(2 * kTileTokens + 2 * 16) * dim + 4 * kTileTokens + size_t(num_rows) * (2 * kTileTokens + 4);
  return std::max(bf16_float_values.panel_bytes(dim, num_rows), words);
}

// 16 rows of words to their pairs of positions in the panel.
void place_words(const int16_t* rows, int dim, int block, uint8_t* panel) {
  for (int pair = 0; pair < 8; ++pair, rows += 2 * dim)
    for (int d = 0; d < dim; d += 16) {
      const __m256i first = load256(rows + d), second = load256(rows + dim + d);
      uint8_t* const to = panel + (d / 16 * (kTileTokens / 2) + 8 * block + pair) * 64;
      store256(to, _mm256_blend_epi16(first, _mm256_slli_epi32(second, 16), 0xaa));
      store256(to + 32, _mm256_blend_epi16(_mm256_srli_epi32(first, 16), second, 0xaa));
    }
}

// weights * units of a row in fixed point; returns what a step is worth
OCTAVO_INLINE float fix_weights(const float* weights, const float* units, int16_t* to) {
  __m256 scaled[kTileTokens / 8], top = _mm256_setzero_ps(), sum = _mm256_setzero_ps();
#pragma GCC unroll 8
  for (int i = 0; i < kTileTokens / 8; ++i) {
    scaled[i] = _mm256_mul_ps(_mm256_loadu_ps(weights + 8 * i), _mm256_loadu_ps(units + 8 * i));
    top = _mm256_max_ps(top, scaled[i]);
    sum = _mm256_add_ps(sum, scaled[i]);
  }
  const float largest = OCTAVO_ISA::largest_lane(top);
  const float steps = steps_per_unit(largest, OCTAVO_ISA::sum_lanes(sum), kTileTokens);
  const __m256 to_fixed = _mm256_set1_ps(steps);
#pragma GCC unroll 4
  for (int i = 0; i < kTileTokens / 8; i += 2)
    store256(to + 8 * i, to_words(_mm256_mul_ps(scaled[i], to_fixed), _mm256_mul_ps(scaled[i + 1], to_fixed)));
  return steps > 0 ? 1 / steps : 0.0f;
}

template <int kRows>
__attribute__((noinline)) void add_words(const int16_t* weights, const float* factors, const uint8_t* panel,
                                         uint64_t seen, int dim, float* accumulators) {
  WordSums<kRows> sums;
  for (int block = 0; block < kTileTokens; block += 16) {
    if ((seen >> block & 0xffff) == 0) continue;
    for (int t = block; t < block + 16; t += 2) sums.add(weights + t, kTileTokens, panel + t * 32);
  }
  unrolled<2 * kRows>([&](auto i) __attribute__((always_inline)) {
    float* const to = accumulators + int64_t(i / 2) * dim + i % 2 * 8;
    _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums.at[i]), _mm256_set1_ps(factors[i / 2]),
                                         _mm256_loadu_ps(to)));
  });
}

void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  if (num_rows < kPanelRows)
    return bf16_float_values.accumulate(layout, tile, weights, num_rows, scratch, accumulators);
  const int dim = layout.v.dim;
  uint8_t* const panel = static_cast<uint8_t*>(scratch);
  int16_t* const rows = reinterpret_cast<int16_t*>(panel + size_t(2 * kTileTokens) * dim);
  float* const units = reinterpret_cast<float*>(rows + 16 * dim);
  int16_t* const fixed = reinterpret_cast<int16_t*>(units + kTileTokens);
  float* const factors = reinterpret_cast<float*>(fixed + size_t(num_rows) * kTileTokens);
  std::fill(units, units + kTileTokens, 0.0f);
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (block.base == nullptr) continue;
    if (next.base != nullptr) prefetch(v_codes(layout, next.base, next.offset), 16 * layout.v.row_bytes);
    fix_block(v_codes(layout, block.base, block.offset), layout.v, tile.mask(b), rows, units + 16 * b);
    place_words(rows, dim, b, panel);
  }
  for (int row = 0; row < num_rows; ++row)
    factors[row] = fix_weights(weights + row * kTileTokens, units, fixed + row * kTileTokens);
  for (int d = 0; d < dim; d += 16)
    for_tile_rows(num_rows, [&](int row, auto count) {
      add_words<count()>(fixed + row * kTileTokens, factors + row, panel + d / 16 * (kTileTokens / 2) * 64, tile.bits, dim,
                         accumulators + int64_t(row) * dim + d);
    });
}

int value_width(int dim) { return bf16_float_values.width(dim); }
void to_natural(int dim, const float* accumulator, float* row) { bf16_float_values.to_natural(dim, accumulator, row); }

constexpr KeySide keys = {query_bytes, key_panel_bytes, load_queries, score};
constexpr ValueSide values = {value_width, value_panel_bytes, accumulate, to_natural};

}  // namespace

const KeySide* bf16_word_keys(int dim) { return dim % 16 == 0 ? &keys : nullptr; }
const ValueSide* bf16_word_values(int dim) { return dim % 16 == 0 ? &values : nullptr; }

}  // namespace octavo::OCTAVO_ISA
