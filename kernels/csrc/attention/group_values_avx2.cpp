// Value side for nvfp4 pages: products of bytes (VPMADDUBSW). Softmax weights are multiplied by the scale of
// their V row and group and become 8-bit fixed point; codes become integers of at most kLargestValue.
// Products are summed exactly in 16-bit lanes over a stretch of 32 positions, then added to float
// accumulators.
//
// Rounding preserves the total weight, as in byte_weights_avx2.h, but within each column (one group of one
// stretch): a position passes its rounding error on to the next. Eight columns are rounded at once.
#include <algorithm>
#include <cstring>

#include "attention/byte_rows_avx2.h"
#include "attention/byte_sums_avx2.h"
#include "attention/byte_weights_avx2.h"
#include "attention/group_codes_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kLanes8 = 8;
static_assert(kStretches == 2);

// Columns are ordered by group, then stretch; a vector has four groups.
static_assert(kSlots == 4);
constexpr int num_vectors(int dim) { return dim / kChunk; }

// Scales of the tile's rows, by position within the stretch and by column. Scales of invisible rows are
// arbitrary, because their weights are 0.
struct Scales {
  static constexpr int kMost = kStretch * num_vectors(kMaxDim) * kLanes8;
  int columns;
  alignas(32) float scales[kMost];

  Scales(const PageLayout& layout, const Tile& tile) : columns(num_vectors(layout.v.dim) * kLanes8) {
    const int bytes = layout.v.scale_bytes;
    uint8_t copies[kTileTokens * kMaxDim / kNvGroup];
    const uint8_t* of_blocks[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      const Tile::Block& block = tile.blocks[b];
      const uint8_t* from = block.base != nullptr ? v_scale(layout, block.base, block.offset) : nullptr;
      of_blocks[b] = from;
      if (tile.mask(b) == 0xffff) continue;
      uint8_t* const copy = copies + b * 16 * bytes;
      of_blocks[b] = copy;
      std::memset(copy, Nvfp4::kAnyScale, size_t(16 * bytes));
      for (int t = 0; t < 16; ++t)
        if (tile.mask(b) >> t & 1) std::memcpy(copy + t * bytes, from + t * bytes, size_t(bytes));
    }
    for (int b = 0; b < 2; ++b)
      Nvfp4::tile_scales(of_blocks[b], of_blocks[2 + b], bytes, scales + b * 16 * columns);
  }
};

// Adding this constant to a running sum of weights puts the rounded sum into bits 8 to 15 of the float, and
// the fraction into the eight bits below.
constexpr float kPoint = 1.5f * (1 << 15) + 0.5f;

// Fixed-point weights of up to four rows: kParts vectors for each vector of columns and pair of positions.
// The two bytes of a pair are repeated, because two neighbouring 16-bit lanes of V belong to a group. Columns
// of both stretches alternate, so that one vector serves a stretch without a permutation.
class Weights {
 public:
  Weights(const PageLayout& layout, const Tile& tile, const float* weights, void* scratch)
      : scales_(layout, tile),
        weights_(weights),
        vectors_(num_vectors(layout.v.dim)),
        pairs_(static_cast<uint8_t*>(scratch)),
        units_(reinterpret_cast<float*>(pairs_ + kMostRows * vectors_ * kVectorBytes)) {}

  static size_t scratch_bytes(int dim) {
    return size_t(kMostRows) * num_vectors(dim) * (kVectorBytes + 4 * kLanes8);
  }

  // Converts several rows at once, because each row is a long chain of dependent additions.
  template <int kRows>
  void fix(int row) {
    alignas(32) float beside[kRows * kTileTokens];
    for (int r = 0; r < kRows; ++r)
      put_stretches_side_by_side(weights_ + (row + r) * kTileTokens, beside + r * kTileTokens);
    for (int v = 0; v < vectors_; ++v) fix_vector<kRows>(beside, v);
  }

  class Rows {
   public:
    Rows(const Weights& weights, int, int stretch, int dim, int)
        : pairs_(weights.pairs_ + dim / kChunk * kVectorBytes + stretch * kPairs * 32),
          units_(weights.units_ + dim / kChunk * kLanes8),
          row_vectors_(weights.vectors_),
          stretch_(stretch) {}

    __attribute__((always_inline)) __m256i pair(int row, int pair, int) const {
      return load256(pairs_ + row * row_vectors_ * kVectorBytes + pair * 32);
    }
    __attribute__((always_inline)) void add(__m256i sums, int row, int, float* accumulators) const {
      const __m256 all = _mm256_loadu_ps(units_ + row * row_vectors_ * kLanes8);
      add_sums(sums, stretch_ == 0 ? _mm256_permute_ps(all, 0x88) : _mm256_permute_ps(all, 0xdd),
               accumulators);
    }

   private:
    const uint8_t* pairs_;
    const float* units_;
    int row_vectors_, stretch_;
  };

 private:
  static constexpr int kMostRows = 4;
  static constexpr int kVectorBytes = kStretches * kPairs * 32;

  static void put_stretches_side_by_side(const float* from, float* to) {
    for (int i = 0; i < kStretch; i += 8, to += 16) {
      const __m256 first = _mm256_loadu_ps(from + i), second = _mm256_loadu_ps(from + kStretch + i);
      const __m256 low = _mm256_unpacklo_ps(first, second), high = _mm256_unpackhi_ps(first, second);
      _mm256_store_ps(to, _mm256_permute2f128_ps(low, high, 0x20));
      _mm256_store_ps(to + 8, _mm256_permute2f128_ps(low, high, 0x31));
    }
  }

  OCTAVO_INLINE __m256 both_stretches(const float* beside) {
    return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(beside)));
  }

  template <int kRows>
  __attribute__((noinline)) void fix_vector(const float* beside, int v) {
    const float* const of_columns = scales_.scales + v * kLanes8;
    const int columns = scales_.columns;
    // For each pair of positions: the product of the first, and the sum of both (sums advance by pairs).
    __m256 first[kPairs][kRows], pairs[kPairs][kRows], top[kRows], sum[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) top[r] = sum[r] = _mm256_setzero_ps();
    for (int pair = 0; pair < kPairs; ++pair) {
      const int even = 2 * pair * columns, odd = even + columns;
      const __m256 scales[2] = {_mm256_load_ps(of_columns + even), _mm256_load_ps(of_columns + odd)};
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m256 weights[2] = {both_stretches(beside + r * kTileTokens + 4 * pair),
                                   both_stretches(beside + r * kTileTokens + 4 * pair + 2)};
        const __m256 a = _mm256_mul_ps(weights[0], scales[0]), b = _mm256_mul_ps(weights[1], scales[1]);
        first[pair][r] = a;
        pairs[pair][r] = _mm256_add_ps(a, b);
        top[r] = _mm256_max_ps(_mm256_max_ps(a, b), top[r]);
        sum[r] = _mm256_add_ps(pairs[pair][r], sum[r]);
      }
    }
    __m256 to_fixed[kRows], running[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m256 unit = _mm256_max_ps(_mm256_mul_ps(top[r], _mm256_set1_ps(1 / kLargestWeight)),
                                        _mm256_mul_ps(sum[r], _mm256_set1_ps(1 / kLargestSum<Nvfp4>)));
      to_fixed[r] = _mm256_and_ps(_mm256_div_ps(_mm256_set1_ps(1), unit),
                                  _mm256_cmp_ps(unit, _mm256_set1_ps(1e-33f), _CMP_GT_OQ));
      const int at = (r * vectors_ + v) * kLanes8;
      _mm256_storeu_ps(units_ + at, _mm256_mul_ps(unit, _mm256_set1_ps(1.0f / Nvfp4::kScale)));
      running[r] = _mm256_set1_ps(kPoint);
    }
    uint8_t* to = pairs_ + v * kVectorBytes;
    for (int pair = 0; pair < kPairs; ++pair, to += 32) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m256 even = _mm256_fmadd_ps(first[pair][r], to_fixed[r], running[r]);
        const __m256 odd = _mm256_fmadd_ps(pairs[pair][r], to_fixed[r], running[r]);
        const __m256i of_even = _mm256_sub_epi8(_mm256_castps_si256(even), _mm256_castps_si256(running[r]));
        const __m256i of_odd = _mm256_sub_epi8(_mm256_castps_si256(odd), _mm256_castps_si256(even));
        running[r] = odd;
        const __m256i both = _mm256_blend_epi16(of_even, _mm256_slli_epi32(of_odd, 16), 0xaa);
        store_pair(both, to + r * vectors_ * kVectorBytes);
      }
    }
  }

  // Stores bytes 1 and 3 of each column, the weights of a pair.
  OCTAVO_INLINE void store_pair(__m256i both, uint8_t* to) {
    const __m128i first = _mm_setr_epi8(1, 3, 1, 3, 9, 11, 9, 11, 1, 3, 1, 3, 9, 11, 9, 11);
    const __m128i second = _mm_add_epi8(first, _mm_set1_epi8(4));
    store256(to, _mm256_shuffle_epi8(both, _mm256_broadcastsi128_si256(first)));
    store256(to + kPairs * 32, _mm256_shuffle_epi8(both, _mm256_broadcastsi128_si256(second)));
  }

  const Scales scales_;
  const float* weights_;
  int vectors_;
  uint8_t* pairs_;
  float* units_;
};

size_t value_panel_bytes(int dim, int) { return Weights::scratch_bytes(dim); }

void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  Weights fixed(layout, tile, weights, scratch);
  accumulate_tile<Nvfp4>(layout, tile, fixed, num_rows, accumulators);
}

constexpr ValueSide sides = {value_width, value_panel_bytes, accumulate, to_natural<Nvfp4>};

}  // namespace

const ValueSide* group_values(CodeType codes) { return codes == CodeType::nvfp4 ? &sides : nullptr; }

}  // namespace octavo::OCTAVO_ISA
