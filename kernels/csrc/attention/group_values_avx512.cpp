// Weighted sums over pages whose V has a scale for each group of dims (mxfp4, nvfp4, affine), by products of
// bytes (attention/value_panel_avx512.h): weights times the scale of their row and group become fixed point
// of the largest of their group in a tile, in two bytes or one. Of affine, whose codes are unsigned, weights
// are signed, as its scales are; a group's biases are summed in float32, as they are.
//
// A vector of the panel holds dims of kSlots groups, one in each 128 bits, or of fewer that have several;
// those of a set, which share the weights' vectors. Weights are made where they are used: 128 bits hold four
// positions of a block, times the scales of a slot's group. Where a group has two slots, two blocks of it are
// a batch; a group that has all takes its blocks as they lie.
//   V panel, scales [sets][kBatches][4 quads of positions] (and biases behind those of a set), then of each
//   row and set the weights [4 blocks][high, low bytes][kSlots][4 quads] (of a group that has all slots
//   [high, low bytes][4 quads][4 blocks]), and factors and sums of biases by lane
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "attention/value_panel_avx512.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kSlots = 4;
constexpr int kQuads = 4;  // of a block

// Groups of a chunk of the panel: kSets sets of kGroups each.
template <class Code>
constexpr int kChunkGroups = kChunkDims<Code> / Code::kGroup;
template <class Code>
constexpr int kSets = kChunkGroups<Code> > kSlots ? kChunkGroups<Code> / kSlots : 1;
template <class Code>
constexpr int kGroups = kChunkGroups<Code> / kSets<Code>;
template <class Code>
constexpr int kPer = Code::kAffine ? 2 : 1;  // numbers of a group: its scale, and bias
template <class Code>
constexpr int kEach = kSlots / kGroups<Code>;
template <class Code>
constexpr int kBatches = kBlocks / kEach<Code>;
template <class Code>
constexpr bool kAsTheyLie = kEach<Code> == kSlots;
template <class Code>
constexpr int kBlockBytes =
    kAsTheyLie<Code> ? 4 : Code::kParts * 64;  // from the weights of a block to the next
template <class Code>
constexpr int kSetBytes = Code::kParts * 64 * kBatches<Code> * (kAsTheyLie<Code> ? 1 : kEach<Code>);

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
    factors = reinterpret_cast<__m512*>(bytes + sets * kSetBytes<Code>);
    biases = factors + sets;
  }
};

template <class Code>
size_t panel_bytes(int dim, int num_rows) {
  const size_t width = size_t(value_width<Code>(dim));
  return width * kTileTokens + width / Code::kGroup * kPer<Code> * kBlocks * 64 +
         size_t(num_rows) * num_sets<Code>(dim) * (kSetBytes<Code> + 64 * kPer<Code>);
}

// 128 bits of four vectors by their place: those of vector i become place i of each.
OCTAVO_INLINE void transpose_lanes(__m512 (&vectors)[4]) {
  const auto mix = [](__m512i x, __m512i y, auto select) {
    return _mm512_shuffle_i32x4(x, y, decltype(select)::value);
  };
  constexpr std::integral_constant<int, 0x44> lower;
  constexpr std::integral_constant<int, 0xee> upper;
  constexpr std::integral_constant<int, 0x88> even;
  constexpr std::integral_constant<int, 0xdd> odd;
  const __m512i a = _mm512_castps_si512(vectors[0]), b = _mm512_castps_si512(vectors[1]);
  const __m512i c = _mm512_castps_si512(vectors[2]), d = _mm512_castps_si512(vectors[3]);
  const __m512i ab_lower = mix(a, b, lower), ab_upper = mix(a, b, upper);
  const __m512i cd_lower = mix(c, d, lower), cd_upper = mix(c, d, upper);
  vectors[0] = _mm512_castsi512_ps(mix(ab_lower, cd_lower, even));
  vectors[1] = _mm512_castsi512_ps(mix(ab_lower, cd_lower, odd));
  vectors[2] = _mm512_castsi512_ps(mix(ab_upper, cd_upper, even));
  vectors[3] = _mm512_castsi512_ps(mix(ab_upper, cd_upper, odd));
}

// Of the tile's rows; zeros where nobody sees them, and past the last group.
template <class Code>
void load_scales(const PageLayout& layout, const Tile& tile, __m512* scales) {
  const int groups = layout.v.dim / Code::kGroup, padded = value_width<Code>(layout.v.dim) / Code::kGroup;
  __m512 by_group[(kMaxDim + kChunkDims<Code>) / Code::kGroup * kPer<Code> * kBlocks];
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    const int known = block.base == nullptr ? 0 : groups;
    if (known > 0)
      load_group_scales<Code>(v_scale(layout, block.base, block.offset), layout.v.scale_bytes, groups,
                              tile.mask(b), by_group + b, kBlocks);
    for (int i = known * kPer<Code>; i < padded * kPer<Code>; ++i)
      by_group[i * kBlocks + b] = _mm512_setzero_ps();
  }
  for (int set = 0; set < num_sets<Code>(layout.v.dim); ++set)
    for (int number = 0; number < kPer<Code>; ++number)
      for (int batch = 0; batch < kBatches<Code>; ++batch, scales += kQuads) {
        __m512 quads[4];
#pragma GCC unroll 4
        for (int slot = 0; slot < kSlots; ++slot) {
          const int group = group_of<Code>(set, slot / kEach<Code>);
          quads[slot] =
              by_group[(group * kPer<Code> + number) * kBlocks + batch * kEach<Code> + slot % kEach<Code>];
        }
        if constexpr (!kAsTheyLie<Code>) transpose_lanes(quads);
#pragma GCC unroll 4
        for (int quad = 0; quad < kQuads; ++quad) scales[quad] = quads[quad];
      }
}

// Weights of a quad of positions of each block of a batch, where their slots are (of a block, as they lie).
template <class Code>
OCTAVO_INLINE __m512 spread_weights(const float* weights, int batch, int quad) {
  if constexpr (kAsTheyLie<Code>) return _mm512_loadu_ps(weights + 16 * quad);
  const auto four = [&](int block) {
    const float* const from = weights + (batch * kEach<Code> + block) * 16 + quad * 4;
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  };
  __m512i spread = four(0);
  if constexpr (kEach<Code> == 2) spread = _mm512_mask_mov_epi32(spread, 0xf0f0, four(1));
  return _mm512_castsi512_ps(spread);
}

// Each group's lanes folded to one number, in all of them.
template <class Code, class Fold>
OCTAVO_INLINE __m512 fold_groups(__m512 all, Fold fold) {
  const auto with = [&](__m512i other) { all = fold(all, _mm512_castsi512_ps(other)); };
  with(_mm512_shuffle_epi32(_mm512_castps_si512(all), _MM_PERM_ENUM(0x4e)));
  with(_mm512_shuffle_epi32(_mm512_castps_si512(all), _MM_PERM_ENUM(0xb1)));
  if constexpr (kEach<Code> >= 2)
    with(_mm512_shuffle_i32x4(_mm512_castps_si512(all), _mm512_castps_si512(all), 0xb1));
  if constexpr (kEach<Code> == 4)
    with(_mm512_shuffle_i32x4(_mm512_castps_si512(all), _mm512_castps_si512(all), 0x4e));
  return all;
}

// Bytes of a batch, 16 of a block in each 128 bits, to the blocks' vectors.
template <class Code>
OCTAVO_INLINE void store_batch(__m512i bytes, uint8_t* to) {
  if constexpr (kEach<Code> == 2) {
    _mm512_storeu_si512(to, _mm512_shuffle_i32x4(bytes, bytes, 0xa0));
    _mm512_storeu_si512(to + kBlockBytes<Code>, _mm512_shuffle_i32x4(bytes, bytes, 0xf5));
  } else {
    _mm512_storeu_si512(to, bytes);
  }
}

// Weights in one byte, rounded so that no mass is lost, as in code_values_avx512.cpp: each lane hands its
// error on to the next quad, and the lanes of a group begin with errors that are spread evenly.
template <class Code>
OCTAVO_INLINE void round_to_bytes(const __m512 (&scaled)[kBatches<Code>][kQuads], __m512 to_fixed,
                                  uint8_t* to) {
  constexpr int kLanes = 4 * kEach<Code>;  // of a group
  alignas(64) static constexpr float kInOrder[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  alignas(64) static constexpr float kInTurn[16] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
  alignas(64) static constexpr float kInPairs[16] = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
  const __m512 lanes = _mm512_load_ps(kEach<Code> == 1 ? kInTurn : kEach<Code> == 2 ? kInPairs : kInOrder);
  __m512 running =
      _mm512_fmadd_ps(lanes, _mm512_set1_ps(1.0f / kLanes), _mm512_set1_ps(0.5f / kLanes - 0.5f));
  __m512i before = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int batch = 0; batch < kBatches<Code>; ++batch) {
    __m512i fixed[kQuads];
#pragma GCC unroll 4
    for (int quad = 0; quad < kQuads; ++quad) {
      running = _mm512_fmadd_ps(scaled[batch][quad], to_fixed, running);
      const __m512i rounded = _mm512_cvtps_epi32(running);
      fixed[quad] = _mm512_sub_epi32(rounded, before);
      before = rounded;
    }
    const __m512i low = _mm512_packs_epi32(fixed[0], fixed[1]), high = _mm512_packs_epi32(fixed[2], fixed[3]);
    store_batch<Code>(Code::kAffine ? _mm512_packs_epi16(low, high) : _mm512_packus_epi16(low, high),
                      to + batch * kEach<Code> * kBlockBytes<Code>);
  }
}

// Weights in two bytes. Signed ones: high bytes are rounded, low ones what is left.
template <class Code>
OCTAVO_INLINE void round_to_words(const __m512 (&scaled)[kBatches<Code>][kQuads], __m512 to_fixed,
                                  uint8_t* to) {
  const auto pack = [](__m512i a, __m512i b) {
    return Code::kAffine ? _mm512_packs_epi32(a, b) : _mm512_packus_epi32(a, b);
  };
  const __m512i byte = _mm512_set1_epi32(0x00ff00ff);
#pragma GCC unroll 4
  for (int batch = 0; batch < kBatches<Code>; ++batch, to += kEach<Code> * kBlockBytes<Code>) {
    __m512i fixed[kQuads];
#pragma GCC unroll 4
    for (int quad = 0; quad < kQuads; ++quad) {
      fixed[quad] = _mm512_cvtps_epi32(_mm512_mul_ps(scaled[batch][quad], to_fixed));
      if constexpr (Code::kAffine) fixed[quad] = _mm512_add_epi32(fixed[quad], _mm512_set1_epi32(128));
    }
    const __m512i first = pack(fixed[0], fixed[1]), second = pack(fixed[2], fixed[3]);
    const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
    __m512i low = _mm512_packus_epi16(_mm512_and_si512(first, byte), _mm512_and_si512(second, byte));
    if constexpr (Code::kAffine) low = _mm512_xor_si512(low, _mm512_set1_epi8(char(0x80)));
    store_batch<Code>(high, to);
    store_batch<Code>(low, to + 64);
  }
}

// What the largest weight becomes: a byte that may be one more after rounding; 127 * 256 + 127 leaves signed
// bytes.
template <class Code>
constexpr float kLargestFixed =
    Code::kParts == 1 ? (Code::kAffine ? 126.0f : 254.0f) : (Code::kAffine ? 32639.0f : 65535.0f);

// A row's weights times the scales of a set, and the sums of its weights times biases.
template <class Code>
OCTAVO_INLINE void fix_weights(const float* weights, int set, int at, const Weights<Code>& to) {
  constexpr int kVectors = kBatches<Code> * kQuads;
  const __m512* const scales = to.scales + set * kVectors * kPer<Code>;
  __m512 scaled[kBatches<Code>][kQuads], tops[kQuads], bias = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int batch = 0; batch < kBatches<Code>; ++batch)
#pragma GCC unroll 4
    for (int quad = 0; quad < kQuads; ++quad) {
      const __m512 spread = spread_weights<Code>(weights, batch, quad);
      __m512& product = scaled[batch][quad];
      product = _mm512_mul_ps(spread, scales[batch * kQuads + quad]);
      const __m512 magnitude = Code::kAffine ? _mm512_abs_ps(product) : product;
      tops[quad] = batch == 0 ? magnitude : _mm512_max_ps(tops[quad], magnitude);
      if constexpr (Code::kAffine)
        bias = _mm512_fmadd_ps(spread, scales[kVectors + batch * kQuads + quad], bias);
    }
  const __m512 top =
      fold_groups<Code>(_mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3])),
                        [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
  const __mmask16 some = _mm512_cmp_ps_mask(top, _mm512_set1_ps(1e-30f), _CMP_GE_OQ);
  const __m512 to_fixed = hide(_mm512_div_ps(_mm512_set1_ps(kLargestFixed<Code>), top), some);
  to.factors[at] = _mm512_mul_ps(top, _mm512_set1_ps(1 / kLargestFixed<Code>));
  if constexpr (Code::kAffine)
    to.biases[at] = fold_groups<Code>(bias, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
  uint8_t* const bytes = to.bytes + size_t(at) * kSetBytes<Code>;
  if constexpr (Code::kParts == 1) round_to_bytes<Code>(scaled, to_fixed, bytes);
  else round_to_words<Code>(scaled, to_fixed, bytes);
}

// Weights of a quad of positions for a set's vectors.
template <class Code, int kQuad>
OCTAVO_INLINE __m512i load_weights(const uint8_t* from) {
  if constexpr (kAsTheyLie<Code>) return broadcast4(from + 16 * kQuad);
  return _mm512_shuffle_epi32(_mm512_loadu_si512(from), _MM_PERM_ENUM(kQuad * 0x55));
}

template <class Code>
OCTAVO_INLINE void add_products(__m512i& sum, __m512i weights, __m512i values) {
  if constexpr (Code::kAffine) add_dots(sum, values, weights);
  else add_dots(sum, weights, values);
}

// Products of a quad of positions of block b, of rows whose weights lie `stride` bytes apart.
template <class Code, int kQuad, int kRows, class Source>
OCTAVO_INLINE void add_quad(const uint8_t* from, size_t stride, const Source& source, int b, int vector,
                            __m512i (&high)[kRows][4], __m512i (&low)[kRows][4]) {
  __m512i values[4];
  source.load(b, kQuad, vector, values);
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r) {
    const __m512i upper = load_weights<Code, kQuad>(from + r * stride);
    const __m512i lower = Code::kParts == 2 ? load_weights<Code, kQuad>(from + r * stride + 64) : upper;
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      add_products<Code>(high[r][v], upper, values[v]);
      if constexpr (Code::kParts == 2) add_products<Code>(low[r][v], lower, values[v]);
    }
  }
}

template <class Code, int kRows, class Source>
OCTAVO_INLINE void accumulate_rows(const Weights<Code>& weights, int first, const Source& source,
                                   int num_vectors, uint32_t blocks, float* accumulators) {
  constexpr int kSetVectors = kChunkDims<Code> / 16 / kSets<Code>;
  const int sets = num_vectors / kSetVectors;
  const size_t stride = size_t(sets) * kSetBytes<Code>;
  for (int vector = 0; vector < num_vectors; vector += 4) {
    const int at = first * sets + vector / kSetVectors;
    __m512i high[kRows][4], low[kRows][4];
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) high[r][v] = low[r][v] = _mm512_setzero_si512();
    for (int b = 0; b < kBlocks; ++b) {
      if (!(blocks >> b & 1)) continue;
      const uint8_t* const from = weights.bytes + size_t(at) * kSetBytes<Code> + b * kBlockBytes<Code>;
      add_quad<Code, 0, kRows>(from, stride, source, b, vector, high, low);
      add_quad<Code, 1, kRows>(from, stride, source, b, vector, high, low);
      add_quad<Code, 2, kRows>(from, stride, source, b, vector, high, low);
      add_quad<Code, 3, kRows>(from, stride, source, b, vector, high, low);
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
        add_sums(Code::kParts == 2 ? join(high[r][v], low[r][v]) : high[r][v], factor, to + 16 * v);
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

const ValueSide* group_values(const AttendArgs& args) {
  const bool bytes = by_bytes(args);
  switch (args.layout.v.codes) {
    case CodeType::mxfp4: return bytes ? &sides<InBytes<Mxfp4>> : &sides<Mxfp4>;
    case CodeType::nvfp4: return bytes ? &sides<InBytes<Nvfp4>> : &sides<Nvfp4>;
    case CodeType::affine4: return bytes ? &sides<InBytes<Affine4>> : &sides<Affine4>;
    case CodeType::affine8: return &sides<Affine8>;
    default: return nullptr;
  }
}

}  // namespace octavo::OCTAVO_ISA
