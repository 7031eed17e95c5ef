// Value side for nvfp4, which has a scale per group of dims: products of bytes
// (attention/value_panel_avx512.h). Weights are multiplied by the scale of their row and group. The products
// become one-byte fixed point relative to the group's largest product in the tile.
//
// A vector of the panel holds dims of four groups, one in each 128 bits. For 128 dims, vectors 0 to 3 hold
// the even groups and vectors 4 to 7 the odd ones. Such a set of four groups needs one vector of weights per
// block: each 128 bits hold the weights of the block's 16 positions times the scales of one group.
//   V panel, scales [sets][4 blocks][4 quads of positions], then for each row and set the weights [4 blocks]
//   [4 groups][4 quads] and the factors by lane
#include <algorithm>

#include "attention/value_panel_avx512.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kQuads = 4;       // quads of positions per block
constexpr int kGroups = 4;      // groups per set
constexpr int kSetVectors = 4;  // panel vectors per set
constexpr int kSetBytes = 64 * kBlocks;
constexpr float kLargestFixed = 254;  // integer of the largest weight; rounding may add one

int num_sets(int dim) { return value_width<Nvfp4>(dim) / (16 * kSetVectors); }

// Returns which group the i-th 128 bits of a set's vectors hold.
int group_of(int set, int i) { return set / 2 * 2 * kGroups + 2 * i + set % 2; }

struct Weights {
  __m512* scales;
  uint8_t* bytes;
  __m512* factors;

  Weights(void* scratch, int dim, int num_rows) {
    scales = reinterpret_cast<__m512*>(static_cast<uint8_t*>(scratch) +
                                       size_t(value_width<Nvfp4>(dim)) * kTileTokens);
    bytes = reinterpret_cast<uint8_t*>(scales + size_t(num_sets(dim)) * kBlocks * kQuads);
    factors = reinterpret_cast<__m512*>(bytes + size_t(num_rows) * num_sets(dim) * kSetBytes);
  }
};

size_t panel_bytes(int dim, int num_rows) {
  const size_t sets = size_t(num_sets(dim));
  return size_t(value_width<Nvfp4>(dim)) * kTileTokens + sets * kBlocks * kQuads * 64 +
         size_t(num_rows) * sets * (kSetBytes + 64);
}

// Transposes four vectors as a 4 by 4 matrix of 128-bit lanes.
OCTAVO_INLINE void transpose_lanes(__m512 (&vectors)[4]) {
  const __m512 ab_lower = _mm512_shuffle_f32x4(vectors[0], vectors[1], 0x44);
  const __m512 ab_upper = _mm512_shuffle_f32x4(vectors[0], vectors[1], 0xee);
  const __m512 cd_lower = _mm512_shuffle_f32x4(vectors[2], vectors[3], 0x44);
  const __m512 cd_upper = _mm512_shuffle_f32x4(vectors[2], vectors[3], 0xee);
  vectors[0] = _mm512_shuffle_f32x4(ab_lower, cd_lower, 0x88);
  vectors[1] = _mm512_shuffle_f32x4(ab_lower, cd_lower, 0xdd);
  vectors[2] = _mm512_shuffle_f32x4(ab_upper, cd_upper, 0x88);
  vectors[3] = _mm512_shuffle_f32x4(ab_upper, cd_upper, 0xdd);
}

// Loads group scales of the tile's rows; zeros for invisible rows and past the last group.
void load_scales(const PageLayout& layout, const Tile& tile, __m512* scales) {
  const int groups = layout.v.dim / kNvGroup, sets = num_sets(layout.v.dim);
  __m512 by_group[(kMaxDim + kChunkDims<Nvfp4>) / kNvGroup * kBlocks];
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    const int known = block.base == nullptr ? 0 : groups;
    if (known > 0)
      load_group_scales(v_scale(layout, block.base, block.offset), layout.v.scale_bytes, groups, tile.mask(b),
                        by_group + b, kBlocks);
    for (int i = known; i < sets * kGroups; ++i) by_group[i * kBlocks + b] = _mm512_setzero_ps();
  }
  for (int set = 0; set < sets; ++set)
    for (int b = 0; b < kBlocks; ++b, scales += kQuads) {
      __m512 quads[kQuads];
#pragma GCC unroll 4
      for (int i = 0; i < kGroups; ++i) quads[i] = by_group[group_of(set, i) * kBlocks + b];
      transpose_lanes(quads);
#pragma GCC unroll 4
      for (int quad = 0; quad < kQuads; ++quad) scales[quad] = quads[quad];
    }
}

// Returns the largest lane of each 128 bits, repeated in all four lanes.
OCTAVO_INLINE __m512 largest_of_lanes(__m512 all) {
  all = _mm512_max_ps(all, _mm512_permute_ps(all, 0x4e));
  return _mm512_max_ps(all, _mm512_permute_ps(all, 0xb1));
}

// Multiplies a row's weights by the scales of a set and converts them to bytes. Rounding preserves the total,
// as in code_values_avx512.cpp: each lane passes its error on to the same lane of the next quad, and a
// group's lanes start from evenly spread errors.
OCTAVO_INLINE void fix_weights(const float* weights, int set, int at, const Weights& to) {
  const __m512* const scales = to.scales + set * kBlocks * kQuads;
  __m512 scaled[kBlocks][kQuads], tops[kQuads];
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b)
#pragma GCC unroll 4
    for (int quad = 0; quad < kQuads; ++quad) {
      const __m512 four = _mm512_broadcast_f32x4(_mm_loadu_ps(weights + 16 * b + 4 * quad));
      scaled[b][quad] = _mm512_mul_ps(four, scales[b * kQuads + quad]);
      tops[quad] = b == 0 ? scaled[b][quad] : _mm512_max_ps(tops[quad], scaled[b][quad]);
    }
  const __m512 top =
      largest_of_lanes(_mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3])));
  const __mmask16 some = _mm512_cmp_ps_mask(top, _mm512_set1_ps(1e-30f), _CMP_GE_OQ);
  const __m512 to_fixed = hide(_mm512_div_ps(_mm512_set1_ps(kLargestFixed), top), some);
  to.factors[at] = _mm512_mul_ps(top, _mm512_set1_ps(1 / kLargestFixed));
  __m512 running = _mm512_broadcast_f32x4(_mm_setr_ps(-0.375f, -0.125f, 0.125f, 0.375f));
  __m512i before = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    __m512i fixed[kQuads];
#pragma GCC unroll 4
    for (int quad = 0; quad < kQuads; ++quad) {
      running = _mm512_fmadd_ps(scaled[b][quad], to_fixed, running);
      const __m512i rounded = _mm512_cvtps_epi32(running);
      fixed[quad] = _mm512_sub_epi32(rounded, before);
      before = rounded;
    }
    const __m512i low = _mm512_packs_epi32(fixed[0], fixed[1]), high = _mm512_packs_epi32(fixed[2], fixed[3]);
    _mm512_storeu_si512(to.bytes + size_t(at) * kSetBytes + 64 * b, _mm512_packus_epi16(low, high));
  }
}

// Adds products of block b's quad number kQuad for kRows rows, whose weights are `stride` bytes apart.
template <int kQuad, int kRows, class Source>
OCTAVO_INLINE void add_quad(const uint8_t* from, size_t stride, const Source& source, int b, int vector,
                            __m512i (&sums)[kRows][4]) {
  __m512i values[4];
  source.load(b, kQuad, vector, values);
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r) {
    const __m512i weights =
        _mm512_shuffle_epi32(_mm512_loadu_si512(from + r * stride), _MM_PERM_ENUM(kQuad * 0x55));
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) add_dots(sums[r][v], weights, values[v]);
  }
}

template <int kRows, class Source>
OCTAVO_INLINE void accumulate_rows(const Weights& weights, int first, const Source& source, int num_vectors,
                                   uint32_t blocks, float* accumulators) {
  const int sets = num_vectors / kSetVectors;
  const size_t stride = size_t(sets) * kSetBytes;
  for (int vector = 0; vector < num_vectors; vector += kSetVectors) {
    const int at = first * sets + vector / kSetVectors;
    __m512i sums[kRows][4];
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sums[r][v] = _mm512_setzero_si512();
    for (int b = 0; b < kBlocks; ++b) {
      if (!(blocks >> b & 1)) continue;
      const uint8_t* const from = weights.bytes + size_t(at) * kSetBytes + 64 * b;
      add_quad<0, kRows>(from, stride, source, b, vector, sums);
      add_quad<1, kRows>(from, stride, source, b, vector, sums);
      add_quad<2, kRows>(from, stride, source, b, vector, sums);
      add_quad<3, kRows>(from, stride, source, b, vector, sums);
    }
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v)
        add_sums(sums[r][v], weights.factors[at + r * sets],
                 accumulators + (size_t(first + r) * num_vectors + vector + v) * 16);
  }
}

void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  const int dim = layout.v.dim, num_vectors = value_width<Nvfp4>(dim) / 16, sets = num_sets(dim);
  __m512i* const panel = static_cast<__m512i*>(scratch);
  const Weights fixed(scratch, dim, num_rows);
  load_scales(layout, tile, fixed.scales);
  uint32_t blocks = 0;
  for (int b = 0; b < kBlocks; ++b) blocks |= uint32_t(tile.blocks[b].base != nullptr) << b;
  for (int r = 0; r < num_rows; ++r)
    for (int set = 0; set < sets; ++set)
      fix_weights(weights + size_t(r) * kTileTokens, set, r * sets + set, fixed);
  if (num_rows <= kDirectRows)
    return for_pairs_of_rows(num_rows, [&]<int kRows>(int row) {
      const DirectValues<Nvfp4> source(layout, tile, row == 0);
      accumulate_rows<kRows>(fixed, row, source, num_vectors, blocks, accumulators);
    });
  load_values<Nvfp4>(layout, tile, panel);
  for_row_blocks(num_rows, [&]<int kRows>(int row) {
    accumulate_rows<kRows>(fixed, row, PanelValues{panel, num_vectors}, num_vectors, blocks, accumulators);
  });
}

constexpr ValueSide sides = {value_width<Nvfp4>, panel_bytes, accumulate, to_natural<Nvfp4>};

}  // namespace

const ValueSide* group_values(const AttendArgs& args) {
  return args.layout.v.codes == CodeType::nvfp4 && by_bytes(args) ? &sides : nullptr;
}

}  // namespace octavo::OCTAVO_ISA
