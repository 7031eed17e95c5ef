// Products of 8-bit codes on AMX tiles: activations signed, weights unsigned. Internal linkage: see
// numeric.h.
#pragma once

#include "linear/amx_tiles.h"

namespace octavo::amx {
namespace {

constexpr int kStepCodes = 64;          // inputs of one tile of activations, at most
constexpr int kQuadBytes = 4 * kPanel;  // four inputs of a panel

// The inputs of up to 32 rows that are added up, block by block, and what they meet in a panel.
struct CodeSteps {
  const int8_t* x;
  std::size_t row_stride;  // bytes from row to row
  const uint8_t* codes;
  int block;  // inputs of a block
  int blocks = 1;
  std::size_t x_stride = 0, stride = 0;  // bytes from block to block

  // body(x of the first row, codes) for the inputs of each step, in order.
  template <class Body>
  void each(Body&& body) const {
    const int step = std::min(block, kStepCodes);
    for (int b = 0; b < blocks; ++b)
      for (int k = 0; k < block; k += step)
        body(x + x_stride * b + k, codes + stride * b + static_cast<std::size_t>(k) * kPanel);
  }
};

// dots[rows][64] of up to 16 rows: all four columns of tiles at once. kFar: codes are prefetched as they lie
// in memory, see fetch_quarter; steps are of kStepCodes then.
template <bool kFar, class Between>
inline void multiply_upper_codes(const CodeSteps& steps, int32_t* dots, Between&& between) {
  Awake awake;
  int index = 0;
  start_sums();
  steps.each([&](const int8_t* x, const uint8_t* codes) {
    if constexpr (kFar) fetch_quarter(codes, 0);
    _tile_loadd(4, x, steps.row_stride);
    _tile_loadd(6, codes, kQuadBytes);
    _tile_dpbsud(0, 4, 6);
    if constexpr (kFar) fetch_quarter(codes, 1);
    _tile_loadd(7, codes + 64, kQuadBytes);
    _tile_dpbsud(1, 4, 7);
    if constexpr (kFar) fetch_quarter(codes, 2);
    _tile_loadd(6, codes + 128, kQuadBytes);
    _tile_dpbsud(2, 4, 6);
    if constexpr (kFar) fetch_quarter(codes, 3);
    _tile_loadd(7, codes + 192, kQuadBytes);
    _tile_dpbsud(3, 4, 7);
    awake.step(index++);
    between();
  });
  _tile_stored(0, dots, kPairBytes);
  _tile_stored(1, dots + 16, kPairBytes);
  _tile_stored(2, dots + 32, kPairBytes);
  _tile_stored(3, dots + 48, kPairBytes);
}

// The same of 17 to 32 rows: two by two tiles, the two halves of the panel in turn.
template <class Between>
inline void multiply_both_codes(const CodeSteps& steps, int32_t* dots, Between&& between) {
  Awake awake;
  const std::size_t lower_x = kTileRows * steps.row_stride;
  for (int half = 0; half < 2; ++half) {
    int32_t* upper = dots + 32 * half;
    int32_t* lower = upper + kTileRows * kPanel;
    int index = 0;
    start_sums();
    steps.each([&](const int8_t* x, const uint8_t* codes) {
      const uint8_t* w = codes + 128 * half;
      load_tile<true, 4>(x, steps.row_stride);
      load_tile<true, 6>(w, kQuadBytes);
      _tile_dpbsud(0, 4, 6);
      load_tile<true, 7>(w + 64, kQuadBytes);
      _tile_dpbsud(1, 4, 7);
      load_tile<true, 5>(x + lower_x, steps.row_stride);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
      awake.step(index++);
      between();
    });
    _tile_stored(0, upper, kPairBytes);
    _tile_stored(1, upper + 16, kPairBytes);
    _tile_stored(2, lower, kPairBytes);
    _tile_stored(3, lower + 16, kPairBytes);
  }
}

// Tiles must be configured for the rows, and steps of at most kStepCodes; between() after each step.
template <class Between>
inline void multiply_codes(const CodeSteps& steps, bool has_lower, int32_t* dots, Between&& between) {
  if (has_lower) multiply_both_codes(steps, dots, between);
  else multiply_upper_codes<false>(steps, dots, between);
}

}  // namespace
}  // namespace octavo::amx
