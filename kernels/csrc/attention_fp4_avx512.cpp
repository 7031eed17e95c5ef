// fp4 pages by integer dot products (VNNI). E2M1 values are halves of the integers 0, 1, 2, 3, 4, 6, 8,
// 12, so products with integer queries and weights are exact, and a row's fp16 scale is applied to
// its scores, or to its weights, as one float factor.
//
// Queries and softmax weights become 16-bit fixed point in two bytes, each byte a row of its own for
// vpdpbusd: their rounding, 2^-16 of the largest element, is far below bf16's.
//
//   K panel  [dim / 4][64 positions][4]  unsigned: twice the value, plus 12
//   V panel  [16][width][4 positions]    signed: twice the value
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention_avx512.h"
#include "attention_rows.h"
#include "page_codes.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kOffset = 12;  // makes K codes unsigned; its share of a product is subtracted at the end

OCTAVO_INLINE __m512i table(int offset) {
  alignas(16) int8_t bytes[16];
  for (int code = 0; code < 16; ++code) bytes[code] = int8_t(2 * kE2M1[code] + offset);
  return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}

OCTAVO_INLINE __m512i low_nibbles(__m512i codes) { return _mm512_and_si512(codes, _mm512_set1_epi8(15)); }
OCTAVO_INLINE __m512i high_nibbles(__m512i codes) { return low_nibbles(_mm512_srli_epi16(codes, 4)); }

OCTAVO_INLINE __m512i broadcast4(const void* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return _mm512_set1_epi32(four);
}

OCTAVO_INLINE __m512 halves(const uint8_t* from, __mmask16 mask) {
  return _mm512_maskz_cvtph_ps(mask, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// 256 * high + low of two rows of products
OCTAVO_INLINE __m512i join(__m512i high, __m512i low) {
  return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}

// ---- queries: per row `dim` high bytes, then `dim` low bytes; then a factor and an offset per row ----

struct Queries {
  int8_t* bytes;
  float* factors;
  int32_t* offsets;

  Queries(void* memory, int dim, int num_rows)
      : bytes(static_cast<int8_t*>(memory)),
        factors(reinterpret_cast<float*>(bytes + round_up64(size_t(num_rows) * 2 * dim))),
        offsets(reinterpret_cast<int32_t*>(factors + num_rows)) {}
};

size_t query_bytes(int dim, int num_rows) {
  return round_up64(size_t(num_rows) * 2 * dim) + size_t(num_rows) * 8;
}

// The panel holds dims in the order of nibbles in a word: 0 2 4 6, then 1 3 5 7.
OCTAVO_INLINE int panel_dim(int i) { return i / 8 * 8 + i % 4 * 2 + i / 4 % 2; }

void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
  const RowFormat& format = args.layout.k;
  const int group = group_size(args), num_rows = item.num_tokens * group, dim = format.dim;
  Queries queries(memory, dim, num_rows);
  alignas(64) float row[kMaxDim];
  for (int r = 0; r < num_rows; ++r) {
    load_row(args.queries, item.first_token + r / group, item.kv_head * group + r % group, dim, row);
    if (format.rotated) hadamard(row, dim);
    float largest = 0;
    for (int d = 0; d < dim; ++d) largest = std::max(largest, std::fabs(row[d]));
    // 127 * 256 + 127 leaves the high byte within a signed byte.
    const float to_fixed = largest > 1e-30f ? 32639.0f / largest : 0.0f;
    int8_t* const high = queries.bytes + size_t(r) * 2 * dim;
    int32_t sum = 0;
    for (int i = 0; i < dim; ++i) {
      const int32_t fixed = int32_t(std::nearbyintf(row[panel_dim(i)] * to_fixed));
      const int32_t upper = (fixed + 128) >> 8;
      high[i] = int8_t(upper);
      high[dim + i] = int8_t(fixed - upper * 256);
      sum += fixed;
    }
    queries.factors[r] = largest / 32639.0f * 0.5f;
    queries.offsets[r] = sum * kOffset;
  }
}

// ---- K ----

size_t key_panel_bytes(int dim) { return size_t(dim) * kTileTokens; }

void load_keys(const PageLayout& layout, const Tile& tile, __m512i* panel) {
  const __m512i lookup = table(kOffset);
  const int num_words = layout.k.dim / 8;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (block.base == nullptr) continue;
    const uint8_t* from = k_codes(layout, block.base, block.offset);
    if (next.base != nullptr) {
      prefetch(k_codes(layout, next.base, next.offset), 16 * layout.k.row_bytes);
      prefetch(k_scale(layout, next.base, next.offset), 1);
    }
    for (int word = 0; word < num_words; word += 16, from += 64) {
      const int count = std::min(16, num_words - word);
      const __mmask16 valid = __mmask16((1u << count) - 1);
      __m512i rows[16];
#pragma GCC unroll 16
      for (int t = 0; t < 16; ++t) rows[t] = _mm512_maskz_loadu_epi32(valid, from + t * layout.k.row_bytes);
      transpose16(rows);
      __m512i* to = panel + size_t(word) * 2 * kBlocks + b;
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        if (i >= count) break;
        to[2 * i * kBlocks] = _mm512_shuffle_epi8(lookup, low_nibbles(rows[i]));
        to[(2 * i + 1) * kBlocks] = _mm512_shuffle_epi8(lookup, high_nibbles(rows[i]));
      }
    }
  }
}

template <int kRows>
OCTAVO_INLINE void score_rows(const Queries& queries, int first, int dim, const __m512i* panel,
                              const __m512 (&scales)[kBlocks], float* scores) {
  __m512i high[kRows][kBlocks], low[kRows][kBlocks];
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) high[r][b] = low[r][b] = _mm512_setzero_si512();
  const int8_t* from = queries.bytes + size_t(first) * 2 * dim;
  for (int i = 0; i < dim; i += 4, panel += kBlocks) {
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      const int8_t* row = from + r * 2 * dim + i;
      const __m512i upper = broadcast4(row), lower = broadcast4(row + dim);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        high[r][b] = _mm512_dpbusd_epi32(high[r][b], panel[b], upper);
        low[r][b] = _mm512_dpbusd_epi32(low[r][b], panel[b], lower);
      }
    }
  }
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r) {
    const __m512i offset = _mm512_set1_epi32(queries.offsets[first + r]);
    const __m512 factor = _mm512_set1_ps(queries.factors[first + r]);
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      const __m512 product = _mm512_cvtepi32_ps(_mm512_sub_epi32(join(high[r][b], low[r][b]), offset));
      _mm512_storeu_ps(scores + size_t(first + r) * kTileTokens + 16 * b,
                       _mm512_mul_ps(_mm512_mul_ps(product, factor), scales[b]));
    }
  }
}

void score(const PageLayout& layout, const Tile& tile, const void* memory, int num_rows, void* scratch,
           float* scores) {
  __m512i* const panel = static_cast<__m512i*>(scratch);
  const int dim = layout.k.dim;
  load_keys(layout, tile, panel);
  __m512 scales[kBlocks];
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    scales[b] = block.base == nullptr ? _mm512_setzero_ps()
                                      : halves(k_scale(layout, block.base, block.offset), tile.mask(b));
  }
  const Queries queries(const_cast<void*>(memory), dim, num_rows);
  for_row_blocks(num_rows, [&]<int kRows>(int row) {
    score_rows<kRows>(queries, row, dim, panel, scales, scores);
  });
}

// ---- V: a chunk of 64 code bytes (128 dims) becomes 8 vectors ----

int value_width(int dim) { return (dim + 127) / 128 * 128; }

// The panel, then per row 64 high bytes, 64 low bytes and a factor.
size_t value_panel_bytes(int dim, int num_rows) {
  return size_t(value_width(dim)) * kTileTokens + size_t(num_rows) * (2 * kTileTokens + 4);
}

// Four rows of code bytes to 8 vectors of four signed bytes each, one byte per row. Lane 4 c + k of
// vector 2 m + n is dim 2 (16 c + 4 m + k) + n.
OCTAVO_INLINE void expand_values(const __m512i (&rows)[4], __m512i lookup, __m512i* to) {
  const __m512i ab_low = _mm512_unpacklo_epi8(rows[0], rows[1]);
  const __m512i ab_high = _mm512_unpackhi_epi8(rows[0], rows[1]);
  const __m512i cd_low = _mm512_unpacklo_epi8(rows[2], rows[3]);
  const __m512i cd_high = _mm512_unpackhi_epi8(rows[2], rows[3]);
  const __m512i quads[4] = {_mm512_unpacklo_epi16(ab_low, cd_low), _mm512_unpackhi_epi16(ab_low, cd_low),
                            _mm512_unpacklo_epi16(ab_high, cd_high), _mm512_unpackhi_epi16(ab_high, cd_high)};
#pragma GCC unroll 4
  for (int m = 0; m < 4; ++m) {
    to[2 * m] = _mm512_shuffle_epi8(lookup, low_nibbles(quads[m]));
    to[2 * m + 1] = _mm512_shuffle_epi8(lookup, high_nibbles(quads[m]));
  }
}

void load_values(const PageLayout& layout, const Tile& tile, __m512i* panel) {
  const __m512i lookup = table(0);
  const int64_t row_bytes = layout.v.row_bytes;
  const int num_vectors = value_width(layout.v.dim) / 16;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (block.base == nullptr) continue;
    const uint8_t* from = v_codes(layout, block.base, block.offset);
    if (next.base != nullptr) {
      prefetch(v_codes(layout, next.base, next.offset), 16 * row_bytes);
      prefetch(v_scale(layout, next.base, next.offset), 1);
    }
    for (int64_t byte = 0; byte < row_bytes; byte += 64) {
      const int64_t count = std::min<int64_t>(64, row_bytes - byte);
      const __mmask64 valid = ~uint64_t(0) >> (64 - count);
      for (int quad = 0; quad < 4; ++quad) {
        __m512i rows[4];
#pragma GCC unroll 4
        for (int t = 0; t < 4; ++t)
          rows[t] = _mm512_maskz_loadu_epi8(valid, from + (4 * quad + t) * row_bytes + byte);
        expand_values(rows, lookup, panel + size_t(4 * b + quad) * num_vectors + byte / 8);
      }
    }
  }
}

struct Weights {
  uint8_t* bytes;
  float* factors;

  Weights(void* scratch, int dim, int num_rows)
      : bytes(static_cast<uint8_t*>(scratch) + size_t(value_width(dim)) * kTileTokens),
        factors(reinterpret_cast<float*>(bytes + size_t(num_rows) * 2 * kTileTokens)) {}
};

// weights[row] * scales as 16-bit fixed point of the row's largest
OCTAVO_INLINE void fix_weights(const float* weights, const __m512 (&scales)[kBlocks], uint8_t* bytes,
                               float& factor) {
  __m512 scaled[kBlocks], largest = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    scaled[b] = _mm512_mul_ps(_mm512_loadu_ps(weights + 16 * b), scales[b]);
    largest = _mm512_max_ps(largest, scaled[b]);
  }
  const float top = _mm512_reduce_max_ps(largest);
  const __m512 to_fixed = _mm512_set1_ps(top > 1e-30f ? 65535.0f / top : 0.0f);
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    const __m512i fixed = _mm512_cvtps_epi32(_mm512_mul_ps(scaled[b], to_fixed));
    const __m128i high = _mm512_cvtepi32_epi8(_mm512_srli_epi32(fixed, 8));
    const __m128i low = _mm512_cvtepi32_epi8(fixed);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + 16 * b), high);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + kTileTokens + 16 * b), low);
  }
  factor = top / 65535.0f * 0.5f;
}

template <int kRows>
OCTAVO_INLINE void accumulate_rows(const Weights& weights, int first, const __m512i* panel, int num_vectors,
                                   uint32_t blocks, float* accumulators) {
  for (int vector = 0; vector < num_vectors; vector += 4) {
    __m512i high[kRows][4], low[kRows][4];
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) high[r][v] = low[r][v] = _mm512_setzero_si512();
    for (int b = 0; b < kBlocks; ++b) {
      if (!(blocks >> b & 1)) continue;
      for (int quad = 4 * b; quad < 4 * b + 4; ++quad) {
        const __m512i* values = panel + size_t(quad) * num_vectors + vector;
        const uint8_t* from = weights.bytes + size_t(first) * 2 * kTileTokens + 4 * quad;
#pragma GCC unroll 3
        for (int r = 0; r < kRows; ++r) {
          const __m512i upper = broadcast4(from + r * 2 * kTileTokens);
          const __m512i lower = broadcast4(from + r * 2 * kTileTokens + kTileTokens);
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v) {
            high[r][v] = _mm512_dpbusd_epi32(high[r][v], upper, values[v]);
            low[r][v] = _mm512_dpbusd_epi32(low[r][v], lower, values[v]);
          }
        }
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      const __m512 factor = _mm512_set1_ps(weights.factors[first + r]);
      float* to = accumulators + (size_t(first + r) * num_vectors + vector) * 16;
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const __m512 sum = _mm512_cvtepi32_ps(join(high[r][v], low[r][v]));
        _mm512_storeu_ps(to + 16 * v, _mm512_fmadd_ps(sum, factor, _mm512_loadu_ps(to + 16 * v)));
      }
    }
  }
}

void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  __m512i* const panel = static_cast<__m512i*>(scratch);
  const int num_vectors = value_width(layout.v.dim) / 16;
  load_values(layout, tile, panel);
  __m512 scales[kBlocks];
  uint32_t blocks = 0;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    scales[b] = block.base == nullptr ? _mm512_setzero_ps()
                                      : halves(v_scale(layout, block.base, block.offset), tile.mask(b));
    blocks |= uint32_t(block.base != nullptr) << b;
  }
  const Weights fixed(scratch, layout.v.dim, num_rows);
  for (int r = 0; r < num_rows; ++r)
    fix_weights(weights + size_t(r) * kTileTokens, scales, fixed.bytes + size_t(r) * 2 * kTileTokens,
                fixed.factors[r]);
  for_row_blocks(num_rows, [&]<int kRows>(int row) {
    accumulate_rows<kRows>(fixed, row, panel, num_vectors, blocks, accumulators);
  });
}

void to_natural(int dim, const float* accumulator, float* row) {
  for (int first = 0; first < dim; first += 128, accumulator += 128)
    for (int c = 0; c < 4; ++c)
      for (int m = 0; m < 4; ++m) {
        const int to = first + 32 * c + 8 * m;
        if (to >= dim) continue;
        const __m128 even = _mm_loadu_ps(accumulator + 32 * m + 4 * c);
        const __m128 odd = _mm_loadu_ps(accumulator + 32 * m + 16 + 4 * c);
        _mm_storeu_ps(row + to, _mm_unpacklo_ps(even, odd));
        _mm_storeu_ps(row + to + 4, _mm_unpackhi_ps(even, odd));
      }
}

}  // namespace

const KeySide fp4_keys = {query_bytes, key_panel_bytes, load_queries, score};
const ValueSide fp4_values = {value_width, value_panel_bytes, accumulate, to_natural};

}  // namespace octavo::OCTAVO_ISA
