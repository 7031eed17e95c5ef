// Many rows of queries against K and V as floats: a block or tile is expanded once for all of them into
// panels, and multiplied in tiles of kTileRows rows and a strip of positions or dims, whose sums stay in
// registers.
//
//   K panel  [16 / kStrip][dim][kStrip positions], of a block
//   V panel  [width / kStrip][64 positions][kStrip dims]
#pragma once

#include "attention_math.h"
#include "attention_sides.h"
#include "unrolled.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kPanelRows = 24;  // query rows of an item, from which on it pays to lay out panels
constexpr int kStripVecs = kLanes < 16 ? 2 : 1;
constexpr int kStrip = kStripVecs * kLanes;
constexpr int kTileRows = 12 / kStripVecs;  // twelve sums: enough to hide what a multiply-add takes

OCTAVO_INLINE Vec broadcast(float x) { return x - Vec{}; }  // -0 stays -0, and the compiler sees it

struct Strip {
  Vec at[kStripVecs];

  __attribute__((always_inline)) explicit Strip(const float* from) {
    unrolled<kStripVecs>([&](auto v) __attribute__((always_inline)) { at[v] = octavo::load(from + v * kLanes); });
  }
};

// Sums of a tile: kRows rows of a strip each.
template <int kRows>
struct Sums {
  Vec at[kRows * kStripVecs] = {};

  __attribute__((always_inline)) void load(const float* from, int64_t stride) {
    unrolled<kRows * kStripVecs>([&](auto i) __attribute__((always_inline)) {
      at[i] = octavo::load(from + i / kStripVecs * stride + i % kStripVecs * kLanes);
    });
  }
  __attribute__((always_inline)) void store(float* to, int64_t stride) const {
    unrolled<kRows * kStripVecs>([&](auto i) __attribute__((always_inline)) {
      octavo::store(to + i / kStripVecs * stride + i % kStripVecs * kLanes, at[i]);
    });
  }
  // One float of each row, `stride` apart, times the strip.
  __attribute__((always_inline)) void add(const float* of_rows, int64_t stride, const Strip& strip) {
    unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
      const Vec value = broadcast(of_rows[r * stride]);
      unrolled<kStripVecs>([&](auto v) __attribute__((always_inline)) {
        add_product(at[r * kStripVecs + v], strip.at[v], value);
      });
    });
  }
};

// body(first_row, std::integral_constant n) over all rows, as many as possible at a time. What a row
// computes does not depend on n.
template <class Body>
OCTAVO_INLINE void for_tile_rows(int num_rows, Body body) {
  int row = 0;
  for (; row + kTileRows <= num_rows; row += kTileRows) body(row, std::integral_constant<int, kTileRows>{});
  unrolled<kTileRows - 1>([&](auto i) {
    if (num_rows - row == i + 1) body(row, std::integral_constant<int, i + 1>{});
  });
}

// Element (i, j) of kLanes vectors becomes (j, i).
OCTAVO_INLINE void transpose(Vec (&rows)[kLanes]) {
  IntVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
#pragma GCC unroll 4
  for (int h = 1; h < kLanes; h *= 2) {
    const IntVec upper = (lane & h) != 0;  // of those lanes the second vector is kept, of the others the first
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if ((i & h) != 0) continue;
      const Vec a = rows[i], b = rows[i + h];
      rows[i] = __builtin_shuffle(a, b, upper ? lane + (kLanes - h) : lane);
      rows[i + h] = __builtin_shuffle(a, b, upper ? lane + kLanes : lane + h);
    }
  }
}

// 16 rows of `dim` floats to a block's panel of K.
inline void transpose_keys(const float* rows, int dim, float* panel) {
  for (int first = 0; first < 16; first += kLanes, rows += kLanes * dim) {
    float* const to = panel + first / kStrip * kStrip * dim + first % kStrip;
    for (int d = 0; d < dim; d += kLanes) {
      Vec square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = octavo::load(rows + i * dim + d);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) octavo::store(to + (d + i) * kStrip, square[i]);
    }
  }
}

// 16 rows of `width` floats to their positions, from `first` on, in the panel of V.
inline void place_values(const float* rows, int width, int first, float* panel) {
  for (int t = first; t < first + 16; ++t, rows += width)
    for (int strip = 0; strip < width / kStrip; ++strip)
      unrolled<kStripVecs>([&](auto v) __attribute__((always_inline)) {
        octavo::store(panel + (strip * kTileTokens + t) * kStrip + v * kLanes,
                      octavo::load(rows + strip * kStrip + v * kLanes));
      });
}

template <int kRows>
__attribute__((noinline)) void score_tile(const float* queries, int dim, const float* panel, float* scores) {
  Sums<kRows> sums;
  for (int d = 0; d < dim; ++d, panel += kStrip) sums.add(queries + d, dim, Strip(panel));
  sums.store(scores, kTileTokens);
}

// scores[row][16] = queries . keys of a block's panel
inline void score_panel(const float* queries, int num_rows, int dim, const float* panel, float* scores) {
  for (int strip = 0; strip < 16; strip += kStrip)
    for_tile_rows(num_rows, [&](int row, auto rows) {
      score_tile<rows()>(queries + int64_t(row) * dim, dim, panel + strip * dim, scores + row * kTileTokens + strip);
    });
}

template <int kRows>
__attribute__((noinline)) void add_tile(const float* weights, const float* panel, uint64_t seen, int width,
                                        float* accumulators) {
  Sums<kRows> sums;
  sums.load(accumulators, width);
  for (int block = 0; block < kTileTokens; block += 16) {
    if ((seen >> block & 0xffff) == 0) continue;
    for (int t = block; t < block + 16; ++t) sums.add(weights + t, kTileTokens, Strip(panel + t * kStrip));
  }
  sums.store(accumulators, width);
}

// accumulators[row] += weights[row][64] * the panel of V, of which blocks that nobody sees are left out
inline void add_panel(const float* weights, int num_rows, int width, const float* panel, uint64_t seen,
                      float* accumulators) {
  for (int at = 0; at < width; at += kStrip, panel += kTileTokens * kStrip)
    for_tile_rows(num_rows, [&](int row, auto rows) {
      add_tile<rows()>(weights + row * kTileTokens, panel, seen, width, accumulators + int64_t(row) * width + at);
    });
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
