// AVX-512: bf16 weights by VDPBF16PS. On CPUs with a slow VDPBF16PS, several rows together use FMAs, with
// bit-identical results.
#include "linear/integer_tiles_avx512.h"

namespace octavo::avx512 {
namespace {

// Input pairs of a panel (32 KiB) that all row tiles multiply before the next pairs. Each row tile prefetches
// a part of the next pairs, so that memory is read all the time and not only during the first tile. On a Zen
// 4, 32 rows are a tenth faster with this; other CPUs were not measured.
constexpr int kSharedPairs = 128;
// Fewest row tiles for one pass over all inputs, because reloading sums costs more than rereading a panel.
constexpr int kManyTiles = 3 * kItemTiles;
constexpr int kPairBytes = 256;  // bytes of a pair of inputs in a panel

// Returns how many bytes ahead a single tile of several rows prefetches; on a Zen 4, 4 KiB are a tenth
// slower.
inline int tile_ahead() { return kCore == Core::zen4 ? 1024 : kAhead; }

// Consecutive input pairs of one panel, which every row tile multiplies in turn.
struct Pairs {
  const uint8_t* words;
  int count;
  bool past_l2;  // whether prefetches of the next pairs bypass L2 (see Core)
};

// Sums of R rows and 64 outputs in registers, loaded from and stored to memory [R][64].
template <int R>
inline __attribute__((always_inline)) void load_sums(const float* from, __m512 (&sums)[R][4]) {
  unrolled<4 * R>([&](auto i) __attribute__((always_inline)) {
    sums[i / 4][i % 4] = _mm512_loadu_ps(from + i / 4 * kPanel + i % 4 * 16);
  });
}
template <int R>
inline __attribute__((always_inline)) void store_sums(const __m512 (&sums)[R][4], float* to) {
  unrolled<4 * R>([&](auto i) __attribute__((always_inline)) {
    _mm512_storeu_ps(to + i / 4 * kPanel + i % 4 * 16, sums[i / 4][i % 4]);
  });
}

// Adds products of R rows and the pairs' weights to sums[R][64]. Each step prefetches kLines lines of
// `ahead`.
template <int R, int kLines>
__attribute__((noinline)) void multiply_pairs(const bf16_t* x, int x_stride, const Pairs& pairs,
                                              const uint8_t* ahead, float* sums) {
  const uint8_t* words = pairs.words;
  __m512 sum[R][4];
  load_sums<R>(sums, sum);
  for (int pair = 0; pair < pairs.count; ++pair, words += kPairBytes, ahead += 64 * kLines) {
    __m512bh w[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      w[c] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(words + 64 * c));
      if (c < kLines) fetch_weights(ahead + 64 * c, pairs.past_l2);
    }
#pragma GCC unroll 6
    for (int m = 0; m < R; ++m) {
      const __m512bh value =
          reinterpret_cast<__m512bh>(broadcast4(x + static_cast<std::size_t>(m) * x_stride + 2 * pair));
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) add_dots(sum[m][c], w[c], value);
    }
  }
  store_sums<R>(sum, sums);
}

// Does the same as multiply_pairs for x in float32, with two FMAs per pair; sums are bit-identical.
template <int R, int kLines>
__attribute__((noinline)) void multiply_flushed(const float* x, int x_stride, const Pairs& pairs,
                                                const uint8_t* ahead, float* sums) {
  const uint8_t* words = pairs.words;
  __m512 sum[R][4];
  load_sums<R>(sums, sum);
  for (int pair = 0; pair < pairs.count; ++pair, words += kPairBytes, ahead += 64 * kLines, x += 2) {
    const uint8_t* from = words;
#pragma GCC unroll 2
    for (int half = 1; half >= 0; --half) {
      __m512 w[4];
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        const __m512i both = _mm512_loadu_si512(from + 64 * c);
        w[c] = half == 1 ? upper_floats(both) : lower_floats(both);
        if (half == 1 && c < kLines) fetch_weights(ahead + 64 * c, pairs.past_l2);
      }
#pragma GCC unroll 6
      for (int m = 0; m < R; ++m) {
        const __m512 value = _mm512_set1_ps(x[static_cast<std::size_t>(m) * x_stride + half]);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) sum[m][c] = _mm512_fmadd_ps(w[c], value, sum[m][c]);
      }
      from = read_again(from);
    }
  }
  store_sums<R>(sum, sums);
}

template <int R, int kLines>
void multiply_pairs(const float* x, int x_stride, const Pairs& pairs, const uint8_t* ahead, float* sums) {
  flushed_to_zero([&] { multiply_flushed<R, kLines>(x, x_stride, pairs, ahead, sums); });
}

// Returns bf16 rows converted to floats, in thread_scratch slot 2.
const float* float_rows(const bf16_t* x, int rows, int padded) {
  float* const floats = static_cast<float*>(thread_scratch(sizeof(float) * padded * rows, 2));
  parallel_for(rows, [&](int m) {
    const std::size_t at = static_cast<std::size_t>(m) * padded;
    for (int k = 0; k < padded; k += 16) _mm512_storeu_ps(floats + at + k, load_bf16(x + at + k));
  });
  return floats;
}

// Adds the products of row tiles [first_tile, last_tile) with a panel to sums[rows][64]; x is [rows, padded
// inputs].
template <class X>
void multiply_tiles(const LinearCall& call, const X* x, const RowTiles& tiles, int panel, int first_tile,
                    int last_tile, float* sums) {
  const int padded = call.weight->shape.padded_inputs(), all = padded / 2;
  const int first = tiles.first(first_tile), count = last_tile - first_tile;
  const int shared = count == 1 ? all : kSharedPairs;
  const int ahead = count > 1 ? kSharedPairs * kPairBytes : call.rows > 1 ? tile_ahead() : row_ahead(16);
  for (int pair = 0; pair < all; pair += shared) {
    const Pairs pairs{call.weight->panel(panel) + pair * kPairBytes, std::min(shared, all - pair),
                      kCore == Core::zen5 && count == 1};  // pairs that several row tiles share stay in L2
    const Fetch fetch(pairs.words + ahead, pairs.count * kPairBytes, count, pairs.count);
    for (int tile = first_tile; tile < last_tile; ++tile) {
      const int row = tiles.first(tile);
      with_rows<kTileRows>(tiles.size(tile), [&](auto R) {
        fetch.for_tile(tile - first_tile, [&](auto lines, const uint8_t* next) {
          multiply_pairs<decltype(R)::value, decltype(lines)::value>(
              x + static_cast<std::size_t>(row) * padded + 2 * pair, padded, pairs, next,
              sums + (row - first) * kPanel);
        });
      });
    }
  }
}

template <class X>
void multiply(const LinearCall& call, const X* x) {
  const RowTiles tiles(call.rows, kTileRows);
  const bool is_many = tiles.count >= kManyTiles;
  for_items(call, tiles, kItemTiles, [&](int panel, int first_tile, int last_tile) {
    const int first = tiles.first(first_tile), rows = tiles.first(last_tile) - first;
    alignas(64) float sums[kItemTiles * kTileRows * kPanel];
    std::memset(sums, 0, sizeof(float) * kPanel * rows);
    const int together = is_many ? 1 : last_tile - first_tile;
    for (int tile = first_tile; tile < last_tile; tile += together)
      multiply_tiles(call, x, tiles, panel, tile, tile + together,
                     sums + (tiles.first(tile) - first) * kPanel);
    finish_rows(call, panel, first, rows, sums);
  });
}

}  // namespace

void linear_bf16(const LinearCall& call) {
  const bf16_t* const x = bf16_rows(call);
  if (kSplitsPairs && call.rows > 1)
    multiply(call, float_rows(x, call.rows, call.weight->shape.padded_inputs()));
  else multiply(call, x);
}

}  // namespace octavo::avx512
