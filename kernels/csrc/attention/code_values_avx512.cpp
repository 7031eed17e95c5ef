// Value sides for pages of codes with one scale per row (attention/codes_avx512.h).
#include <algorithm>
#include <cmath>

#include "attention/codes_avx512.h"
#include "attention/rows.h"
#include "attention/tiles_amx.h"
#include "attention/value_panel_avx512.h"

namespace octavo::OCTAVO_ISA {
namespace {

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
  if (num_rows <= kDirectRows)
    return for_pairs_of_rows(num_rows, [&]<int kRows>(int row) {
      const DirectValues<Code> source(layout, tile, row == 0);
      accumulate_rows<Code, kRows>(fixed, row, source, num_vectors, blocks, accumulators);
    });
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
  switch (args.layout.v.codes) {
    case CodeType::bf16: return args.queries.type == Float::bf16 ? &bf16_values : nullptr;
    case CodeType::int8: return &sides<Int8>;
    case CodeType::fp4: return by_bytes(args) ? &sides<Fp4> : nullptr;
    case CodeType::fp5: return by_bytes(args) ? &sides<Fp5> : nullptr;
    case CodeType::int4: return by_bytes(args) ? &sides<Int4> : nullptr;
    default: return nullptr;
  }
}

}  // namespace octavo::OCTAVO_ISA
