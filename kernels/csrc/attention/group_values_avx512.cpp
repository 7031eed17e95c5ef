// Weighted sums over pages whose V has a scale for each group of dims (mxfp4, nvfp4, affine): codes as bf16,
// which is exact, weights times the scale of their row and group rounded to bf16 (vdpbf16ps). A group's
// biases are summed in float32, as they are.
//
//   V panel  [32][width][2 positions]: of each 16 dims, the even ones first (8-bit codes: in order)
//   then weights [rows][groups][64] bf16, and sums of biases [rows][groups]
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "attention/codes_avx512.h"
#include "attention/rows.h"

namespace octavo::OCTAVO_ISA {
namespace {

int value_width(int dim) { return (dim + 15) / 16 * 16; }

template <class Code>
OCTAVO_INLINE int num_groups(int dim) {
  return dim / Code::kGroup;
}

template <class Code>
size_t panel_bytes(int dim, int num_rows) {
  const size_t groups = size_t(num_groups<Code>(dim));
  return size_t(dim) * kTileTokens * 2 + groups * kBlocks * 2 * 64 +
         round_up64(size_t(num_rows) * groups * kTileTokens * 2) + size_t(num_rows) * groups * 4;
}

// bf16 of the codes' integers, twice: an index of five bits looks up what its lower four say.
template <class Code>
OCTAVO_INLINE __m512i word_table() {
  alignas(64) uint16_t words[32];
  for (int i = 0; i < 32; ++i) {
    const float value = float(Code::value(i & 15));
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    words[i] = uint16_t(bits >> 16);
  }
  return _mm512_load_si512(words);
}

// 16 bytes as floats.
OCTAVO_INLINE __m512i widen(const uint8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)));
}

// Two rows of codes to pairs.
template <class Code>
OCTAVO_INLINE void expand_pair(const uint8_t* first, const uint8_t* second, int dim, __m512i values,
                               __m512i* to) {
  if constexpr (Code::kBits == 8) {
    for (int d = 0; d < dim; d += 16, ++to) {
      const __m512i low = _mm512_srli_epi32(widen(first + d), 16);  // 8 significant bits: the rest is zero
      *to = _mm512_or_si512(low, widen(second + d));
    }
  } else {
    alignas(64) static constexpr int8_t kOrder[64] = {
        0,  -1, 1,  -1, 2,  -1, 3,  -1, 4,  -1, 5,  -1, 6,  -1, 7,  -1, 8,  -1, 9,  -1, 10, -1,
        11, -1, 12, -1, 13, -1, 14, -1, 15, -1, 0,  -1, 1,  -1, 2,  -1, 3,  -1, 4,  -1, 5,  -1,
        6,  -1, 7,  -1, 8,  -1, 9,  -1, 10, -1, 11, -1, 12, -1, 13, -1, 14, -1, 15, -1};
    const __m512i order = _mm512_load_si512(kOrder);
    alignas(64) static constexpr int16_t kShifts[32] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                                        4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4};
    const __m512i shift = _mm512_load_si512(kShifts);
    for (int d = 0; d < dim; d += 16, ++to) {
      __m128i a, b;
      a = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(first + d / 2));
      b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(second + d / 2));
      const __m512i both = _mm512_broadcast_i32x4(_mm_unpacklo_epi8(a, b));
      const __m512i spread = _mm512_srlv_epi16(_mm512_shuffle_epi8(both, order), shift);
      *to = _mm512_permutexvar_epi16(spread, values);
    }
  }
}

template <class Code>
void load_values(const PageLayout& layout, const Tile& tile, __m512i* panel, __m512* scales) {
  const __m512i values = word_table<std::conditional_t<Code::kBits == 8, Affine4, Code>>();
  const int dim = layout.v.dim, groups = num_groups<Code>(dim);
  const int64_t row_bytes = layout.v.row_bytes, scale_bytes = layout.v.scale_bytes;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (block.base == nullptr) continue;
    const uint8_t* from = v_codes(layout, block.base, block.offset);
    if (next.base != nullptr) {
      prefetch(v_codes(layout, next.base, next.offset), 16 * row_bytes);
      prefetch(v_scale(layout, next.base, next.offset), 16 * scale_bytes);
    }
    load_group_scales<Code>(v_scale(layout, block.base, block.offset), scale_bytes, groups, tile.mask(b),
                            scales + b, kBlocks);
    for (int pair = 0; pair < 8; ++pair)
      expand_pair<Code>(from + 2 * pair * row_bytes, from + (2 * pair + 1) * row_bytes, dim, values,
                        panel + size_t(8 * b + pair) * (dim / 16));
  }
}

struct Weights {
  uint16_t* pairs;  // [rows][groups][64]
  float* biases;    // [rows][groups]
};

// A row's weights times the scales, and the sums of its weights times biases.
template <class Code>
OCTAVO_INLINE void scale_weights(const float* weights, const __m512* scales, int groups, uint32_t blocks,
                                 uint16_t* pairs, float* biases) {
  constexpr int kPer = Code::kAffine ? 2 : 1;
  __m512 by_block[kBlocks];
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) by_block[b] = _mm512_loadu_ps(weights + 16 * b);
  for (int g = 0; g < groups; ++g, pairs += kTileTokens, scales += kPer * kBlocks) {
    __m512 bias = _mm512_setzero_ps();
    for (int b = 0; b < kBlocks; ++b) {
      if (!(blocks >> b & 1)) continue;
      const __m512 scaled = _mm512_mul_ps(by_block[b], scales[b]);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs + 16 * b), (__m256i)_mm512_cvtneps_pbh(scaled));
      if constexpr (Code::kAffine) bias = _mm512_fmadd_ps(by_block[b], scales[kBlocks + b], bias);
    }
    if constexpr (Code::kAffine) biases[g] = _mm512_reduce_add_ps(bias);
  }
}

OCTAVO_INLINE __m512bh broadcast2(const void* from) { return (__m512bh)broadcast4(from); }

// Vectors [vector, vector + kVecs) of kRows rows.
template <class Code, int kRows, int kVecs>
OCTAVO_INLINE void accumulate_vectors(const Weights& weights, int first, const __m512i* panel,
                                      int num_vectors, int vector, uint32_t blocks, float* accumulators) {
  const int groups = num_vectors * 16 / Code::kGroup;
  const uint16_t* const from = weights.pairs + size_t(first) * groups * kTileTokens;
  float* const to = accumulators + (size_t(first) * num_vectors + vector) * 16;
  __m512 sums[kRows][kVecs];
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      sums[r][v] = _mm512_loadu_ps(to + (size_t(r) * num_vectors + v) * 16);
      if constexpr (Code::kAffine)
        sums[r][v] = _mm512_add_ps(
            sums[r][v],
            _mm512_set1_ps(weights.biases[size_t(first + r) * groups + (vector + v) * 16 / Code::kGroup]));
    }
  for (int b = 0; b < kBlocks; ++b) {
    if (!(blocks >> b & 1)) continue;
    for (int pair = 8 * b; pair < 8 * b + 8; ++pair) {
      const __m512i* values = panel + size_t(pair) * num_vectors + vector;
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          const int group = (vector + v) * 16 / Code::kGroup;
          add_dots(sums[r][v], (__m512bh)values[v],
                   broadcast2(from + size_t(r * groups + group) * kTileTokens + 2 * pair));
        }
    }
  }
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) _mm512_storeu_ps(to + (size_t(r) * num_vectors + v) * 16, sums[r][v]);
}

template <class Code>
void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  const int dim = layout.v.dim, num_vectors = dim / 16, groups = num_groups<Code>(dim);
  __m512i* const panel = static_cast<__m512i*>(scratch);
  __m512* const scales = reinterpret_cast<__m512*>(panel + size_t(dim) * kTileTokens * 2 / 64);
  uint16_t* const pairs = reinterpret_cast<uint16_t*>(scales + size_t(groups) * 2 * kBlocks);
  const Weights scaled = {pairs,
                          reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(pairs) +
                                                   round_up64(size_t(num_rows) * groups * kTileTokens * 2))};
  load_values<Code>(layout, tile, panel, scales);
  uint32_t blocks = 0;
  for (int b = 0; b < kBlocks; ++b) blocks |= uint32_t(tile.blocks[b].base != nullptr) << b;
  for (int r = 0; r < num_rows; ++r)
    scale_weights<Code>(weights + size_t(r) * kTileTokens, scales, groups, blocks,
                        scaled.pairs + size_t(r) * groups * kTileTokens, scaled.biases + size_t(r) * groups);
  for_row_blocks(num_rows, [&]<int kRows>(int row) {
    int vector = 0;
    for (; vector + 4 <= num_vectors; vector += 4)
      accumulate_vectors<Code, kRows, 4>(scaled, row, panel, num_vectors, vector, blocks, accumulators);
    for (; vector < num_vectors; ++vector)
      accumulate_vectors<Code, kRows, 1>(scaled, row, panel, num_vectors, vector, blocks, accumulators);
  });
}

template <class Code>
void to_natural(int dim, const float* accumulator, float* row) {
  if constexpr (Code::kBits == 8) {
    std::copy(accumulator, accumulator + dim, row);
  } else {
    for (int to = 0; to < dim; to += 16)
      for (int i = 0; i < 8; ++i)
        row[to + 2 * i] = accumulator[to + i], row[to + 2 * i + 1] = accumulator[to + 8 + i];
  }
}

template <class Code>
constexpr ValueSide sides = {value_width, panel_bytes<Code>, accumulate<Code>, to_natural<Code>};

}  // namespace

const ValueSide* group_values(const RowFormat& format) {
  switch (format.codes) {
    case CodeType::mxfp4: return &sides<Mxfp4>;
    case CodeType::nvfp4: return &sides<Nvfp4>;
    case CodeType::affine4: return &sides<Affine4>;
    case CodeType::affine8: return &sides<Affine8>;
    default: return nullptr;
  }
}

}  // namespace octavo::OCTAVO_ISA
