// Value sides for pages of codes with one scale per row (attention/codes_avx512.h). A 32-bit lane of V has
// the codes' integers of four positions of one dim.
//
//   V panel  [16][width][4 positions]
#include <algorithm>
#include <cstring>

#include "attention/ahead.h"
#include "attention/codes_avx512.h"
#include "attention/rows.h"
#include "attention/tiles_amx.h"
#include "runtime/unrolled.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Number of dims in 64 bytes of codes; a row's accumulator has one float per dim.
template <class Code>
constexpr int kChunkDims = 512 / Code::kBits;

template <class Code>
int value_width(int dim) {
  return (dim + kChunkDims<Code> - 1) / kChunkDims<Code> * kChunkDims<Code>;
}

// Interleaves four rows to words with a byte of each: lane 4 c + k of vector m is byte 16 c + 4 m + k.
OCTAVO_INLINE void interleave(const __m512i (&rows)[4], __m512i* quads) {
  const __m512i ab_low = _mm512_unpacklo_epi8(rows[0], rows[1]);
  const __m512i ab_high = _mm512_unpackhi_epi8(rows[0], rows[1]);
  const __m512i cd_low = _mm512_unpacklo_epi8(rows[2], rows[3]);
  const __m512i cd_high = _mm512_unpackhi_epi8(rows[2], rows[3]);
  quads[0] = _mm512_unpacklo_epi16(ab_low, cd_low), quads[1] = _mm512_unpackhi_epi16(ab_low, cd_low);
  quads[2] = _mm512_unpacklo_epi16(ab_high, cd_high), quads[3] = _mm512_unpackhi_epi16(ab_high, cd_high);
}

// Loads bit planes of four rows, beginning with the byte of their first value. Word m of the c-th 128 bits
// has byte 4 c + m of each row.
OCTAVO_INLINE __m512i load_planes(const uint8_t* from, int64_t stride, int64_t left, bool first) {
  __m512i rows;
  if (stride == 16) {
    rows = _mm512_loadu_si512(from);
  } else {
    alignas(64) uint8_t bytes[64] = {};
    for (int t = 0; t < 4; ++t)
      std::memcpy(bytes + 16 * t, from + t * stride, size_t(std::min<int64_t>(16, left)));
    rows = _mm512_load_si512(bytes);
  }
  alignas(64) static constexpr int32_t kWords[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  alignas(16) static constexpr int8_t kBytes[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  rows = _mm512_permutexvar_epi32(_mm512_load_si512(kWords), rows);
  rows = _mm512_shuffle_epi8(
      rows, _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kBytes))));
  return first ? _mm512_maskz_mov_epi32(0xfffe, rows) : rows;  // byte 0 is the row's scale, not bits
}

// Converts code bytes of four rows to vectors whose 32-bit lanes hold one signed byte per row. kHalf selects
// the lower (0) or upper (1) eight bytes of each 128 bits. For nibbles, lane 4 c + k of vector 2 m + n is dim
// 2 (16 c + 4 m + k) + n. Bytes have one half of four vectors.
template <class Code, int kHalf>
OCTAVO_INLINE void expand_half(const __m512i (&rows)[4], const Lookup<Code, 0>& lookup, __m512i planes,
                               __m512i* to) {
  if constexpr (Code::kBits == 8) return interleave(rows, to);
  const auto bytes = [](__m512i a, __m512i b) {
    return kHalf == 0 ? _mm512_unpacklo_epi8(a, b) : _mm512_unpackhi_epi8(a, b);
  };
  const __m512i ab = bytes(rows[0], rows[1]), cd = bytes(rows[2], rows[3]);
  // Mask of bit 2 k for lane k of each 128 bits, because the lane reads bits 2 k and 2 k + 1 of its byte.
  const __m512i low_bit =
      _mm512_broadcast_i32x4(_mm_setr_epi32(0x01010101, 0x04040404, 0x10101010, 0x40404040));
  constexpr auto kFirst = _MM_PERM_ENUM(0x55 * 2 * kHalf), kSecond = _MM_PERM_ENUM(0x55 * (2 * kHalf + 1));
  lookup.expand(_mm512_unpacklo_epi16(ab, cd), Code::kPlanes ? _mm512_shuffle_epi32(planes, kFirst) : planes,
                low_bit, to[0], to[1]);
  lookup.expand(_mm512_unpackhi_epi16(ab, cd), Code::kPlanes ? _mm512_shuffle_epi32(planes, kSecond) : planes,
                low_bit, to[2], to[3]);
}

// Loads 64 bytes of codes of rows [4 quad, 4 quad + 4), from `byte` on, and returns their planes.
template <class Code>
OCTAVO_INLINE __m512i load_four(const PageLayout& layout, const Tile::Block& block, int quad, int64_t byte,
                                __m512i (&rows)[4]) {
  const int64_t row_bytes = layout.v.row_bytes, stride = layout.v.scale_bytes;
  const __mmask64 valid = ~uint64_t(0) >> (64 - std::min<int64_t>(64, row_bytes - byte));
  const uint8_t* const from = v_codes(layout, block.base, block.offset) + 4 * quad * row_bytes + byte;
#pragma GCC unroll 4
  for (int t = 0; t < 4; ++t) rows[t] = _mm512_maskz_loadu_epi8(valid, from + t * row_bytes);
  if constexpr (!Code::kPlanes) return rows[0];
  return load_planes(v_scale(layout, block.base, block.offset) + 4 * quad * stride + byte / 4, stride,
                     stride - byte / 4, byte == 0);
}

template <class Code>
void load_values(const PageLayout& layout, const Tile& tile, __m512i* panel) {
  const Lookup<Code, 0> lookup;
  const int num_vectors = value_width<Code>(layout.v.dim) / 16;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (block.base == nullptr) continue;
    if (next.base != nullptr) {
      prefetch(v_codes(layout, next.base, next.offset), 16 * layout.v.row_bytes);
      prefetch(v_scale(layout, next.base, next.offset), 16 * layout.v.scale_bytes);
    }
    for (int64_t byte = 0; byte < layout.v.row_bytes; byte += 64)
      for (int quad = 0; quad < 4; ++quad) {
        __m512i rows[4];
        const __m512i planes = load_four<Code>(layout, block, quad, byte, rows);
        __m512i* const to = panel + size_t(4 * b + quad) * num_vectors + byte / 64 * (kChunkDims<Code> / 16);
        expand_half<Code, 0>(rows, lookup, planes, to);
        if constexpr (Code::kBits == 4) expand_half<Code, 1>(rows, lookup, planes, to + 4);
      }
  }
}

// Values of four positions, read from a panel four vectors at a time.
struct PanelValues {
  const __m512i* panel;
  int num_vectors;

  __attribute__((always_inline)) void load(int b, int quad, int vector, __m512i (&values)[4]) const {
    const __m512i* const from = panel + size_t(4 * b + quad) * num_vectors + vector;
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) values[v] = from[v];
  }
};

// Vectors like those of PanelValues, converted from pages at each read. Every four positions also prefetch
// some lines of later rows.
template <class Code>
struct DirectValues {
  static constexpr int kHalves = 8 / Code::kBits;  // halves of 64 bytes, four vectors each

  const PageLayout& layout;
  const Tile& tile;
  int num_vectors;
  Ahead aheads[kBlocks];
  Lookup<Code, 0> lookup;

  // `first`: whether these rows are the first to read this tile.
  DirectValues(const PageLayout& layout, const Tile& tile, bool first)
      : layout(layout),
        tile(tile),
        num_vectors(value_width<Code>(layout.v.dim) / 16),
        aheads{ahead_of(0, first), ahead_of(1, first), ahead_of(2, first), ahead_of(3, first)} {
    for (const Tile::Block& next : tile.next)
      if (first && next.base != nullptr)
        prefetch(v_scale(layout, next.base, next.offset), 16 * layout.v.scale_bytes);
  }

  __attribute__((always_inline)) void load(int b, int quad, int vector, __m512i (&values)[4]) const {
    aheads[b].prefetch_part(vector + quad, num_vectors);
    if (kHalves == 1 || vector % 8 == 0) load_half<0>(b, quad, vector, values);
    else load_half<1>(b, quad, vector, values);
  }

 private:
  Ahead ahead_of(int b, bool first) const {
    const Tile none{};
    return Ahead(layout, first ? tile : none, 3 * kBlocks + b);
  }

  template <int kHalf>
  __attribute__((always_inline)) void load_half(int b, int quad, int vector, __m512i (&values)[4]) const {
    __m512i rows[4];
    const __m512i planes = load_four<Code>(layout, tile.blocks[b], quad, vector / 4 / kHalves * 64, rows);
    expand_half<Code, kHalf>(rows, lookup, planes, values);
  }
};

OCTAVO_INLINE void add_sums(__m512i sums, __m512 factor, float* to) {
  _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), factor, _mm512_loadu_ps(to)));
}

// Returns the dim of float i of 64 bytes of codes. Lane 4 c + k of vector m is byte 16 c + 4 m + k; nibbles
// have two vectors for each m, the second for the high ones.
template <class Code>
constexpr int dim_of(int i) {
  constexpr int kEach = 8 / Code::kBits;
  const int lane = i % 16, vector = i / 16;
  return kEach * (lane / 4 * 16 + vector / kEach * 4 + lane % 4) + vector % kEach;
}

// Returns the number of bytes of a row's weights: high bytes, and also low bytes if kParts is 2.
template <class Code>
constexpr int kWeightBytes = Code::kParts * kTileTokens;

// Returns the size of a tile's panel and, behind it, of each row's weights and factor.
template <class Code>
size_t value_panel_bytes(int dim, int num_rows) {
  return size_t(value_width<Code>(dim)) * kTileTokens + size_t(num_rows) * (kWeightBytes<Code> + 4);
}

template <class Code>
struct Weights {
  uint8_t* bytes;
  float* factors;

  Weights(void* scratch, int dim, int num_rows)
      : bytes(static_cast<uint8_t*>(scratch) + size_t(value_width<Code>(dim)) * kTileTokens),
        factors(reinterpret_cast<float*>(bytes + size_t(num_rows) * kWeightBytes<Code>)) {}
};

// Converts weights[row] * scales to fixed point relative to the row's largest product. Rounding to bytes
// preserves the total: each lane passes its error on to the same lane of the next block, whose byte may
// become 1 larger. Lanes start from evenly spread errors, because otherwise many small weights would all
// become 0.
template <class Code>
OCTAVO_INLINE void fix_weights(const float* weights, const __m512 (&scales)[kBlocks], uint8_t* bytes,
                               float& factor) {
  __m512 scaled[kBlocks], largest = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    scaled[b] = _mm512_mul_ps(_mm512_loadu_ps(weights + 16 * b), scales[b]);
    largest = _mm512_max_ps(largest, scaled[b]);
  }
  const float top = _mm512_reduce_max_ps(largest);
  constexpr float kLargest = Code::kParts == 2 ? 65535.0f : 254.0f;
  static_assert(int64_t(65535) * 128 * kTileTokens <= INT32_MAX);
  const __m512 to_fixed = _mm512_set1_ps(top > 1e-30f ? kLargest / top : 0.0f);
  factor = top / kLargest * (1.0f / Code::kScale);
  if constexpr (Code::kParts == 1) {
    alignas(64) static constexpr float kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512 lanes = _mm512_load_ps(kLanes);
    __m512 running = _mm512_fmadd_ps(lanes, _mm512_set1_ps(1.0f / 16), _mm512_set1_ps(-15.0f / 32));
    __m512i before = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      running = _mm512_fmadd_ps(scaled[b], to_fixed, running);
      const __m512i rounded = _mm512_cvtps_epi32(running);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + 16 * b),
                       _mm512_cvtepi32_epi8(_mm512_sub_epi32(rounded, before)));
      before = rounded;
    }
    return;
  }
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    const __m512i fixed = _mm512_cvtps_epi32(_mm512_mul_ps(scaled[b], to_fixed));
    const __m128i high = _mm512_cvtepi32_epi8(_mm512_srli_epi32(fixed, 8));
    const __m128i low = _mm512_cvtepi32_epi8(fixed);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + 16 * b), high);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + kTileTokens + 16 * b), low);
  }
}

template <class Code, int kRows, class Source>
OCTAVO_INLINE void accumulate_rows(const Weights<Code>& weights, int first, const Source& source,
                                   int num_vectors, uint32_t blocks, float* accumulators) {
  for (int vector = 0; vector < num_vectors; vector += 4) {
    __m512i high[kRows][4], low[kRows][4];
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) high[r][v] = low[r][v] = _mm512_setzero_si512();
    for (int b = 0; b < kBlocks; ++b) {
      if (!(blocks >> b & 1)) continue;
#pragma GCC unroll 1
      for (int quad = 0; quad < 4; ++quad) {
        __m512i values[4];
        source.load(b, quad, vector, values);
        const uint8_t* from = weights.bytes + size_t(first) * kWeightBytes<Code> + 16 * b + 4 * quad;
#pragma GCC unroll 3
        for (int r = 0; r < kRows; ++r) {
          const uint8_t* const row = from + r * kWeightBytes<Code>;
          const __m512i upper = broadcast4(row),
                        lower = Code::kParts == 2 ? broadcast4(row + kTileTokens) : upper;
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v) {
            add_dots(high[r][v], upper, values[v]);
            if constexpr (Code::kParts == 2) add_dots(low[r][v], lower, values[v]);
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
        add_sums(Code::kParts == 2 ? join(high[r][v], low[r][v]) : high[r][v], factor, to + 16 * v);
      }
    }
  }
}

// Computes the products on AMX instead; they are integers, so results are bit-identical. The panel of an
// invisible block is arbitrary, because its weights are 0.
template <class Code>
void accumulate_tiled(const Weights<Code>& weights, int num_rows, const __m512i* panel, int num_vectors,
                      float* accumulators) {
  using Tiles = amx::ByteProducts<Code::kParts>;
  constexpr int kLow = amx::kByteRows * 32;
  alignas(64) int32_t products[2][2 * kLow];  // two buffers: AMX fills one while vectors add up the other
  Tiles tiles;
  for (int first = 0; first < num_rows; first += Tiles::kRows) {
    const int count = std::min(Tiles::kRows, num_rows - first);
    tiles.load_weights(weights.bytes + size_t(first) * kWeightBytes<Code>, count);
    for (int vector = 0; vector < num_vectors; vector += 2) {
      int32_t* const pair = products[vector / 2 % 2];
      tiles.weigh(panel + vector, num_vectors * int64_t(sizeof(__m512i)), pair);
      for (int r = 0; r < count; ++r) {
        const int32_t* const from = pair + 32 * r;
        const __m512 factor = _mm512_set1_ps(weights.factors[first + r]);
        float* const to = accumulators + (size_t(first + r) * num_vectors + vector) * 16;
#pragma GCC unroll 2
        for (int v = 0; v < 32; v += 16) {
          const __m512i sums = _mm512_load_si512(from + v);
          add_sums(Code::kParts == 2 ? join(sums, _mm512_load_si512(from + kLow + v)) : sums, factor, to + v);
        }
      }
    }
  }
}

template <class Code>
void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  __m512i* const panel = static_cast<__m512i*>(scratch);
  const int num_vectors = value_width<Code>(layout.v.dim) / 16;
  __m512 scales[kBlocks];
  uint32_t blocks = 0;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    scales[b] = block.base == nullptr ? _mm512_setzero_ps()
                                      : load_row_scales<Code>(v_scale(layout, block.base, block.offset),
                                                              layout.v.scale_bytes, tile.mask(b));
    blocks |= uint32_t(block.base != nullptr) << b;
  }
  const Weights<Code> fixed(scratch, layout.v.dim, num_rows);
  for (int r = 0; r < num_rows; ++r)
    fix_weights<Code>(weights + size_t(r) * kTileTokens, scales, fixed.bytes + size_t(r) * kWeightBytes<Code>,
                      fixed.factors[r]);
  if (num_rows <= kDirectRows) {
    for (int row = 0; row < num_rows; row += 2)
      with_rows<2>(std::min(2, num_rows - row), [&](auto rows) {
        const DirectValues<Code> source(layout, tile, row == 0);
        accumulate_rows<Code, rows()>(fixed, row, source, num_vectors, blocks, accumulators);
      });
    return;
  }
  load_values<Code>(layout, tile, panel);
  if (takes_tiles<Code>(num_rows))
    return accumulate_tiled<Code>(fixed, num_rows, panel, num_vectors, accumulators);
  for_row_blocks(num_rows, [&]<int kRows>(int row) {
    accumulate_rows<Code, kRows>(fixed, row, PanelValues{panel, num_vectors}, num_vectors, blocks,
                                 accumulators);
  });
}

template <class Code>
constexpr ValueSide sides = {value_width<Code>, value_panel_bytes<Code>, accumulate<Code>,
                             to_natural<kChunkDims<Code>, dim_of<Code>>};

}  // namespace

const ValueSide* special_value_side(const AttendArgs& args) {
  if (const ValueSide* side = tiled_values(args)) return side;
  const CodeType codes = args.layout.v.codes;
  if (codes == CodeType::bf16) return args.queries.type == Float::bf16 ? &bf16_values : nullptr;
  if (codes != CodeType::int8 && !by_bytes(args)) return nullptr;
  return integer_side(codes, [](auto code) { return &sides<decltype(code)>; });
}

}  // namespace octavo::OCTAVO_ISA
