// Weighted sums over pages whose V has a scale for each group of dims (mxfp4, nvfp4, affine), by products of
// bytes (attention/value_panel_avx512.h): weights times the scale of their row and group become 16-bit fixed
// point of the largest of their group in a tile, in two bytes. Of affine, whose codes are unsigned, weights
// are signed, as its scales are; a group's biases are summed in float32, as they are.
//
// A vector of the panel holds dims of kSlots groups, one in each 128 bits; those of a set, which share the
// weights' vectors.
//   V panel, scales [groups][4 blocks] (and biases: [groups][2][4]), then of each row and set the weights
//   [4 blocks][low, high bytes][4 quads of positions][kSlots], and factors and sums of biases by lane
#include <algorithm>
#include <cstring>

#include "attention/value_panel_avx512.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kSlots = 4;
constexpr int kSetBytes = kBlocks * 2 * 64;

// Groups of a chunk of the panel: kSets sets of kGroups each.
template <class Code>
constexpr int kChunkGroups = kChunkDims<Code> / Code::kGroup;
template <class Code>
constexpr int kSets = kChunkGroups<Code> > kSlots ? kChunkGroups<Code> / kSlots : 1;
template <class Code>
constexpr int kGroups = kChunkGroups<Code> / kSets<Code>;
template <class Code>
constexpr int kPer = Code::kAffine ? 2 : 1;  // numbers of a group: its scale, and bias

// Lane c of nvfp4 has groups 2 c, of vectors 0 to 3, and 2 c + 1.
template <class Code>
OCTAVO_INLINE int group_of(int set, int i) {
  return set / kSets<Code> * kChunkGroups<Code> + i * kSets<Code> + set % kSets<Code>;
}

template <class Code>
int num_sets(int dim) {
  return value_width<Code>(dim) / kChunkDims<Code> * kSets<Code>;
}

template <class Code>
struct Weights {
  __m512* scales;
  uint8_t* bytes;
  __m512 *factors, *biases;

  Weights(void* scratch, int dim, int num_rows) {
    const size_t width = size_t(value_width<Code>(dim)), sets = size_t(num_rows) * num_sets<Code>(dim);
    scales = reinterpret_cast<__m512*>(static_cast<uint8_t*>(scratch) + width * kTileTokens);
    bytes = reinterpret_cast<uint8_t*>(scales + width / Code::kGroup * kPer<Code> * kBlocks);
    factors = reinterpret_cast<__m512*>(bytes + sets * kSetBytes);
    biases = factors + sets;
  }
};

template <class Code>
size_t panel_bytes(int dim, int num_rows) {
  const size_t width = size_t(value_width<Code>(dim));
  return width * kTileTokens + width / Code::kGroup * kPer<Code> * kBlocks * 64 +
         size_t(num_rows) * num_sets<Code>(dim) * (kSetBytes + 64 * kPer<Code>);
}

// Of the tile's rows; zeros where nobody sees them, and past the last group.
template <class Code>
void load_scales(const PageLayout& layout, const Tile& tile, __m512* scales) {
  const int groups = layout.v.dim / Code::kGroup, padded = value_width<Code>(layout.v.dim) / Code::kGroup;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    const int known = block.base == nullptr ? 0 : groups;
    if (known > 0)
      load_group_scales<Code>(v_scale(layout, block.base, block.offset), layout.v.scale_bytes, groups,
                              tile.mask(b), scales + b, kBlocks);
    for (int i = known * kPer<Code>; i < padded * kPer<Code>; ++i)
      scales[i * kBlocks + b] = _mm512_setzero_ps();
  }
}

// Four vectors, each folded to one number by `fold`: those numbers in every 128 bits.
template <class Fold>
OCTAVO_INLINE __m512 fold_four(__m512 a, __m512 b, __m512 c, __m512 d, Fold fold) {
  const auto pairs = [&](__m512 x, __m512 y) {
    const __m512i first = _mm512_castps_si512(x), second = _mm512_castps_si512(y);
    return _mm512_castps_si512(fold(_mm512_castsi512_ps(_mm512_unpacklo_epi32(first, second)),
                                    _mm512_castsi512_ps(_mm512_unpackhi_epi32(first, second))));
  };
  const __m512i ab = pairs(a, b), cd = pairs(c, d);
  __m512 all = fold(_mm512_castsi512_ps(_mm512_unpacklo_epi64(ab, cd)),
                    _mm512_castsi512_ps(_mm512_unpackhi_epi64(ab, cd)));
  __m512i bits = _mm512_castps_si512(all);
  all = fold(all, _mm512_castsi512_ps(_mm512_shuffle_i32x4(bits, bits, 0x4e)));
  bits = _mm512_castps_si512(all);
  return fold(all, _mm512_castsi512_ps(_mm512_shuffle_i32x4(bits, bits, 0xb1)));
}

// Of each group of a set to its slots.
template <class Code, class Fold>
OCTAVO_INLINE __m512 fold_groups(const __m512 (&groups)[kGroups<Code>], Fold fold) {
  constexpr int kEach = kSlots / kGroups<Code>;
  return fold_four(groups[0], groups[1 / kEach], groups[2 / kEach], groups[3 / kEach], fold);
}

// The slot of each 128 bits in every lane of these.
OCTAVO_INLINE __m512i spread_slots(__m512i slots) {
  alignas(64) static constexpr int8_t kSlot[64] = {
      0, 1, 2,  3,  0,  1,  2,  3,  0,  1,  2,  3,  0,  1,  2,  3,  4,  5,  6,  7, 4,  5,
      6, 7, 4,  5,  6,  7,  4,  5,  6,  7,  8,  9,  10, 11, 8,  9,  10, 11, 8,  9, 10, 11,
      8, 9, 10, 11, 12, 13, 14, 15, 12, 13, 14, 15, 12, 13, 14, 15, 12, 13, 14, 15};
  return _mm512_shuffle_epi8(slots, _mm512_load_si512(kSlot));
}

// Lowest bytes of each 128 bits' four lanes to one word, those above them to the next, zeros elsewhere;
// kUpper: to words 2 and 3.
template <bool kUpper>
OCTAVO_INLINE __m512i gather_bytes(__m512i lanes) {
  alignas(16) static constexpr int8_t kBytes[24] = {-1, -1, -1, -1, -1, -1, -1, -1, 0,  4,  8,  12,
                                                    1,  5,  9,  13, -1, -1, -1, -1, -1, -1, -1, -1};
  const __m128i order = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kBytes + (kUpper ? 0 : 8)));
  return _mm512_shuffle_epi8(lanes, _mm512_broadcast_i32x4(order));
}

// Lane i of 128 bits: words of one slot become words of one kind, of all slots.
OCTAVO_INLINE void transpose_slots(const __m512i (&slots)[kSlots], uint8_t* to) {
  const __m512i ab_low = _mm512_unpacklo_epi32(slots[0], slots[1]);
  const __m512i ab_high = _mm512_unpackhi_epi32(slots[0], slots[1]);
  const __m512i cd_low = _mm512_unpacklo_epi32(slots[2], slots[3]);
  const __m512i cd_high = _mm512_unpackhi_epi32(slots[2], slots[3]);
  _mm512_storeu_si512(to, _mm512_unpacklo_epi64(ab_low, cd_low));
  _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi64(ab_low, cd_low));
  _mm512_storeu_si512(to + 128, _mm512_unpacklo_epi64(ab_high, cd_high));
  _mm512_storeu_si512(to + 192, _mm512_unpackhi_epi64(ab_high, cd_high));
}

// A row's weights times the scales of a set, and the sums of its weights times biases.
template <class Code>
OCTAVO_INLINE void fix_weights(const float* weights, int set, int at, const Weights<Code>& to) {
  constexpr float kLargest = Code::kAffine ? 32639.0f : 65535.0f;  // 127 * 256 + 127 leaves signed bytes
  __m512 by_block[kBlocks], scaled[kGroups<Code>][kBlocks], top[kGroups<Code>], bias[kGroups<Code>];
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) by_block[b] = _mm512_loadu_ps(weights + 16 * b);
#pragma GCC unroll 4
  for (int i = 0; i < kGroups<Code>; ++i) {
    const __m512* const scales = to.scales + group_of<Code>(set, i) * kPer<Code> * kBlocks;
    top[i] = bias[i] = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      scaled[i][b] = _mm512_mul_ps(by_block[b], scales[b]);
      top[i] = _mm512_max_ps(top[i], Code::kAffine ? _mm512_abs_ps(scaled[i][b]) : scaled[i][b]);
      if constexpr (Code::kAffine)
        bias[i] = _mm512_add_ps(bias[i], _mm512_mul_ps(by_block[b], scales[kBlocks + b]));
    }
  }
  const __m512 tops = fold_groups<Code>(top, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
  const __mmask16 some = _mm512_cmp_ps_mask(tops, _mm512_set1_ps(1e-30f), _CMP_GE_OQ);
  const __m512i to_fixed = _mm512_castps_si512(hide(_mm512_div_ps(_mm512_set1_ps(kLargest), tops), some));
  const __m512 units = _mm512_mul_ps(tops, _mm512_set1_ps(1 / kLargest));
  to.factors[at] = _mm512_castsi512_ps(spread_slots(_mm512_castps_si512(units)));
  if constexpr (Code::kAffine) {
    const __m512 sums = fold_groups<Code>(bias, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
    to.biases[at] = _mm512_castsi512_ps(spread_slots(_mm512_castps_si512(sums)));
  }
  constexpr int kEach = kSlots / kGroups<Code>;
  const __m512 factors[kSlots] = {_mm512_castsi512_ps(_mm512_shuffle_epi32(to_fixed, _MM_PERM_ENUM(0x00))),
                                  _mm512_castsi512_ps(_mm512_shuffle_epi32(to_fixed, _MM_PERM_ENUM(0x55))),
                                  _mm512_castsi512_ps(_mm512_shuffle_epi32(to_fixed, _MM_PERM_ENUM(0xaa))),
                                  _mm512_castsi512_ps(_mm512_shuffle_epi32(to_fixed, _MM_PERM_ENUM(0xff)))};
#pragma GCC unroll 2
  for (int b = 0; b < kBlocks; b += 2) {
    __m512i bytes[kGroups<Code>];
#pragma GCC unroll 4
    for (int i = 0; i < kGroups<Code>; ++i) {
      __m512i fixed[2];
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        fixed[j] = _mm512_cvtps_epi32(_mm512_mul_ps(scaled[i][b + j], factors[i * kEach]));
        // Signed: high bytes are rounded, low ones what is left.
        if constexpr (Code::kAffine) fixed[j] = _mm512_add_epi32(fixed[j], _mm512_set1_epi32(128));
      }
      bytes[i] = _mm512_or_si512(gather_bytes<false>(fixed[0]), gather_bytes<true>(fixed[1]));
      if constexpr (Code::kAffine) {
        alignas(16) static constexpr uint32_t kLow[4] = {0x80808080, 0, 0x80808080, 0};
        bytes[i] = _mm512_xor_si512(
            bytes[i], _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kLow))));
      }
    }
    const __m512i slots[kSlots] = {bytes[0], bytes[1 / kEach], bytes[2 / kEach], bytes[3 / kEach]};
    transpose_slots(slots, to.bytes + size_t(at) * kSetBytes + b * 128);
  }
}

// Weights of a quad of positions for a set's vectors.
template <class Code>
OCTAVO_INLINE __m512i load_weights(const uint8_t* from) {
  if constexpr (kGroups<Code> == 1) return broadcast4(from);
  return spread_slots(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

template <class Code>
OCTAVO_INLINE void add_products(__m512i& sum, __m512i weights, __m512i values) {
  if constexpr (Code::kAffine) add_dots(sum, values, weights);
  else add_dots(sum, weights, values);
}

template <class Code, int kRows, class Source>
OCTAVO_INLINE void accumulate_rows(const Weights<Code>& weights, int first, const Source& source,
                                   int num_vectors, uint32_t blocks, float* accumulators) {
  constexpr int kSetVectors = kChunkDims<Code> / 16 / kSets<Code>;
  const int sets = num_vectors / kSetVectors;
  for (int vector = 0; vector < num_vectors; vector += 4) {
    const int at = first * sets + vector / kSetVectors;
    __m512i high[kRows][4], low[kRows][4];
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) high[r][v] = low[r][v] = _mm512_setzero_si512();
    for (int b = 0; b < kBlocks; ++b) {
      if (!(blocks >> b & 1)) continue;
      const uint8_t* from = weights.bytes + size_t(at) * kSetBytes + b * 128;
#pragma GCC unroll 1
      for (int quad = 0; quad < 4; ++quad, from += 16) {
        __m512i values[4];
        source.load(b, quad, vector, values);
#pragma GCC unroll 3
        for (int r = 0; r < kRows; ++r) {
          const __m512i lower = load_weights<Code>(from + size_t(r) * sets * kSetBytes);
          const __m512i upper = load_weights<Code>(from + size_t(r) * sets * kSetBytes + 64);
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v) {
            add_products<Code>(high[r][v], upper, values[v]);
            add_products<Code>(low[r][v], lower, values[v]);
          }
        }
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      const __m512 factor = weights.factors[at + r * sets];
      float* to = accumulators + (size_t(first + r) * num_vectors + vector) * 16;
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        if constexpr (Code::kAffine)
          _mm512_storeu_ps(to + 16 * v,
                           _mm512_add_ps(_mm512_loadu_ps(to + 16 * v), weights.biases[at + r * sets]));
        add_sums(join(high[r][v], low[r][v]), factor, to + 16 * v);
      }
    }
  }
}

template <class Code>
void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  const int dim = layout.v.dim, num_vectors = value_width<Code>(dim) / 16, sets = num_sets<Code>(dim);
  __m512i* const panel = static_cast<__m512i*>(scratch);
  const Weights<Code> fixed(scratch, dim, num_rows);
  load_scales<Code>(layout, tile, fixed.scales);
  uint32_t blocks = 0;
  for (int b = 0; b < kBlocks; ++b) blocks |= uint32_t(tile.blocks[b].base != nullptr) << b;
  for (int r = 0; r < num_rows; ++r)
    for (int set = 0; set < sets; ++set)
      fix_weights<Code>(weights + size_t(r) * kTileTokens, set, r * sets + set, fixed);
  if (num_rows <= kDirectRows)
    return for_pairs_of_rows(num_rows, [&]<int kRows>(int row) {
      const DirectValues<Code> source(layout, tile, row == 0);
      accumulate_rows<Code, kRows>(fixed, row, source, num_vectors, blocks, accumulators);
    });
  load_values<Code>(layout, tile, panel);
  for_row_blocks(num_rows, [&]<int kRows>(int row) {
    accumulate_rows<Code, kRows>(fixed, row, PanelValues{panel, num_vectors}, num_vectors, blocks,
                                 accumulators);
  });
}

template <class Code>
constexpr ValueSide sides = {value_width<Code>, panel_bytes<Code>, accumulate<Code>, to_natural<Code>};

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
