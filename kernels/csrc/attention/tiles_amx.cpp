#include "attention/tiles_amx.h"

#include <algorithm>

#include "attention/sides_avx512.h"
#include "linear/amx_tiles.h"

namespace octavo::amx {
namespace {

constexpr int kTileFloats = kTileRows * 16;
constexpr int kTileValues = kTileRows * kTileInputs;
constexpr int kRowBytes = 64;  // of a tile
constexpr int kPositions = 64;

// Of 16 positions by 16 rows, to the rows' scores of these positions.
void turn(const float* products, int num_rows, float* scores) {
  __m512i lines[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) lines[i] = _mm512_load_si512(products + 16 * i);
  transpose16(lines);
  if (num_rows >= 16) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(scores + i * kPositions, lines[i]);
  } else {
    for (int i = 0; i < num_rows; ++i) _mm512_storeu_si512(scores + i * kPositions, lines[i]);
  }
}

// Two blocks under 32 rows: each of four tiles of products has a tile of keys and one of queries in common
// with another.
void score_two(const uint8_t* first, const uint8_t* second, int64_t stride, const uint16_t* queries,
               int steps, float* products) {
  const uint16_t* lower = queries + size_t(steps) * kTileValues;
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < steps; ++step) {
    _tile_loadd(4, first + step * kRowBytes, stride);
    _tile_loadd(6, queries + size_t(step) * kTileValues, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, lower + size_t(step) * kTileValues, kRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, second + step * kRowBytes, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, products, kRowBytes);
  _tile_stored(1, products + kTileFloats, kRowBytes);
  _tile_stored(2, products + 2 * kTileFloats, kRowBytes);
  _tile_stored(3, products + 3 * kTileFloats, kRowBytes);
}

// All four blocks under 16 rows.
void score_four(const KeyBlocks& keys, const uint16_t* queries, int steps, bool ask, float* products) {
  const auto ask_for = [&](int block, int step) {  // a step's share of the rows
    const uint8_t* const from = keys.soon[block];
    if (!ask || from == nullptr) return;
    for (int64_t at = step * kTileRows * kRowBytes; at < (step + 1) * kTileRows * kRowBytes; at += 64)
      __builtin_prefetch(from + at);
  };
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < steps; ++step) {
    _tile_loadd(6, queries + size_t(step) * kTileValues, kRowBytes);
    ask_for(0, step);
    _tile_loadd(4, keys.rows[0] + step * kRowBytes, keys.stride);
    _tile_dpbf16ps(0, 4, 6);
    ask_for(1, step);
    _tile_loadd(5, keys.rows[1] + step * kRowBytes, keys.stride);
    _tile_dpbf16ps(1, 5, 6);
    ask_for(2, step);
    _tile_loadd(4, keys.rows[2] + step * kRowBytes, keys.stride);
    _tile_dpbf16ps(2, 4, 6);
    ask_for(3, step);
    _tile_loadd(5, keys.rows[3] + step * kRowBytes, keys.stride);
    _tile_dpbf16ps(3, 5, 6);
  }
  _tile_stored(0, products, kRowBytes);
  _tile_stored(1, products + kTileFloats, kRowBytes);
  _tile_stored(2, products + 2 * kTileFloats, kRowBytes);
  _tile_stored(3, products + 3 * kTileFloats, kRowBytes);
}

// Two vectors of up to 16 rows, or of up to 32 where there are `lower` ones.
template <bool kLower>
void add_two(const uint16_t* weights, const uint16_t* values, uint32_t halves, int64_t stride,
             float* accumulators) {
  constexpr int64_t kWeightBytes = kPositions * sizeof(uint16_t);
  float* const below = accumulators + kTileRows * stride / int64_t(sizeof(float));
  finish_stores();
  _tile_loadd(0, accumulators, stride);
  _tile_loadd(1, accumulators + 16, stride);
  if constexpr (kLower) {
    _tile_loadd(2, below, stride);
    _tile_loadd(3, below + 16, stride);
  }
  for (int half = 0; half < 2; ++half) {
    if (!(halves >> half & 1)) continue;
    _tile_loadd(4, weights + half * kTileInputs, kWeightBytes);
    _tile_loadd(6, values + half * kTileValues, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, values + (2 + half) * kTileValues, kRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kLower) {
      _tile_loadd(5, weights + kTileRows * kPositions + half * kTileInputs, kWeightBytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, accumulators, stride);
  _tile_stored(1, accumulators + 16, stride);
  if constexpr (kLower) {
    _tile_stored(2, below, stride);
    _tile_stored(3, below + 16, stride);
  }
}

}  // namespace

void score_tile(const KeyBlocks& keys, uint32_t blocks, const uint16_t* queries, int steps, int num_rows,
                float* scores) {
  alignas(64) float products[4 * kTileFloats];
  Tiles tiles;
  tiles.configure(kTileRows, kTileRows);
  for (int row = 0; row < num_rows; row += 2 * kTileRows) {
    const uint16_t* from = queries + size_t(row / kTileRows) * steps * kTileValues;
    float* to = scores + size_t(row) * kPositions;
    const int upper = std::min(kTileRows, num_rows - row),
              lower = std::min(kTileRows, num_rows - row - upper);
    if (lower <= 0) {
      score_four(keys, from, steps, row == 0, products);
      for (int b = 0; b < 4; ++b)
        if (blocks >> b & 1) turn(products + b * kTileFloats, upper, to + 16 * b);
      continue;
    }
    for (int b = 0; b < 4; b += 2) {
      if ((blocks >> b & 3) == 0) continue;
      score_two(keys.rows[b], keys.rows[b + 1], keys.stride, from, steps, products);
      for (int i = 0; i < 2; ++i) {
        if (!(blocks >> (b + i) & 1)) continue;
        turn(products + 2 * i * kTileFloats, upper, to + 16 * (b + i));
        turn(products + (2 * i + 1) * kTileFloats, lower, to + kTileRows * kPositions + 16 * (b + i));
      }
    }
  }
}

void add_tile(const uint16_t* weights, const uint16_t* values, uint32_t halves, int num_vectors, int num_rows,
              int64_t width, float* accumulators) {
  const int64_t stride = width * int64_t(sizeof(float));
  Tiles tiles;
  for (int row = 0; row < num_rows; row += 2 * kTileRows) {
    const int upper = std::min(kTileRows, num_rows - row),
              lower = std::min(kTileRows, num_rows - row - upper);
    const uint16_t* from = weights + size_t(row) * kPositions;
    float* to = accumulators + row * width;
    tiles.configure(upper, std::max(lower, 0));
    for (int vector = 0; vector < num_vectors; vector += 2) {
      const uint16_t* columns = values + size_t(vector) * 2 * kTileValues;
      if (lower > 0) add_two<true>(from, columns, halves, stride, to + vector * 16);
      else add_two<false>(from, columns, halves, stride, to + vector * 16);
    }
  }
}

}  // namespace octavo::amx
