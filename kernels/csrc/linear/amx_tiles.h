// AMX tiles: registers of a thread, activations laid out for them, and products of blocks.
// Internal linkage: see numeric.h.
//
// One TDPBF16PS multiplies up to 16 rows of 32 bf16 activations by 32 inputs of 16 outputs. Tiles 0..3
// hold sums, 4 and 5 activations, 6 and 7 weights. A block of 17 to 32 rows has two tiles of rows: 0, 1
// and 4 belong to the upper, 2, 3 and 5 to the lower one. In a block of up to 16 rows, 0..3 are the
// four columns of tiles of a panel.
#pragma once

#include <immintrin.h>

#include "linear/common.h"
#include "runtime/loads_avx512.h"

namespace octavo::amx {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileInputs = 32;
constexpr int kBlockRows = 32;
constexpr int kPairBytes = 4 * kPanel;                    // a pair of inputs of a panel
constexpr int kStepBytes = kTileInputs / 2 * kPairBytes;  // a step of 32 inputs of a panel

// The layout _tile_loadconfig wants (Intel SDM, LDTILECFG).
struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// What was stored is in memory before tiles are loaded: the compiler's intrinsics for loading tiles and
// their layout do not tell it what they read, so it may drop or move stores that look unused (GCC 12 does).
inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

// The tile registers, in use for the life of the object.
class Tiles {
 public:
  Tiles() = default;
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // Steps of `step_bytes` per row of activations, four bytes per row of weights.
  void configure(int upper, int lower, int step_bytes = 64) {
    if (upper == upper_ && lower == lower_ && step_bytes == step_bytes_) return;
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = kTileRows;
    }
    config.rows[0] = config.rows[1] = config.rows[4] = static_cast<uint8_t>(upper);
    config.row_bytes[4] = config.row_bytes[5] = static_cast<uint16_t>(step_bytes);
    config.rows[6] = config.rows[7] = static_cast<uint8_t>(step_bytes / 4);
    config.rows[2] = config.rows[3] = config.rows[5] = static_cast<uint8_t>(lower > 0 ? lower : upper);
    finish_stores();
    _tile_loadconfig(&config);
    upper_ = upper;
    lower_ = lower;
    step_bytes_ = step_bytes;
  }

 private:
  int upper_ = 0;
  int lower_ = 0;
  int step_bytes_ = 0;
};

// Up to 32 rows of activations, as tiles are loaded from them.
struct Block {
  const bf16_t* upper_x;
  const bf16_t* lower_x;
  std::size_t stride;  // bytes from row to row
  std::size_t step;    // values from one step of 32 inputs to the next
  int upper;           // rows of the first tile
  int lower;           // rows of the second, maybe 0
};

// Activations in bf16: row-major, or tile after tile ([rows / 16][inputs / 32][16][32], each 1 KiB in
// one piece): rows a power of two apart would all fall into the same few sets of the cache.
struct Activations {
  const bf16_t* data;
  std::size_t inputs;  // padded to whole steps
  bool tiled;

  Block block(int first, int last) const {
    const int rows = last - first, upper = rows < kTileRows ? rows : kTileRows;
    const bf16_t* x = data + first * inputs;
    return {x,
            x + kTileRows * inputs,
            tiled ? kTileInputs * sizeof(bf16_t) : inputs * sizeof(bf16_t),
            static_cast<std::size_t>(tiled ? kTileRows * kTileInputs : kTileInputs),
            upper,
            rows - upper};
  }
};

// Where step `step` of row `row` goes in the tiled layout.
inline bf16_t* tiled_place(bf16_t* data, std::size_t inputs, std::size_t row, std::size_t step) {
  const std::size_t tile = row / kTileRows * (inputs / kTileInputs) + step;
  return data + (tile * kTileRows + row % kTileRows) * kTileInputs;
}

// Values [at, at + 32) of an array as bf16.
inline __m512i load32_bf16(const void* p, Float type, std::size_t at) {
  if (type == Float::bf16) return _mm512_loadu_si512(static_cast<const bf16_t*>(p) + at);
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(load16(p, type, at + 16), load16(p, type, at)));
}

// Tiles 0..3 as they are in memory, or zero. (The intrinsics want literal numbers.)
inline void start_sums(bool first, const float* t0, const float* t1, const float* t2, const float* t3) {
  finish_stores();  // of sums, activations and weights
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, t0, kPairBytes);
    _tile_loadd(1, t1, kPairBytes);
    _tile_loadd(2, t2, kPairBytes);
    _tile_loadd(3, t3, kPairBytes);
  }
}

// Up to 16 rows: all four columns of tiles at once. before(weights of a step, column whose tile is loaded
// next).
template <class Before>
inline void multiply_upper(const Block& block, const uint8_t* weights, int step, int steps, bool first,
                           float* sums, Before&& before) {
  start_sums(first, sums, sums + 16, sums + 32, sums + 48);
  const bf16_t* x = block.upper_x + block.step * step;
  for (; steps > 0; --steps, x += block.step, weights += kStepBytes) {
    before(weights, 0);
    _tile_loadd(4, x, block.stride);
    _tile_loadd(6, weights, kPairBytes);
    _tile_dpbf16ps(0, 4, 6);
    before(weights, 1);
    _tile_loadd(7, weights + 64, kPairBytes);
    _tile_dpbf16ps(1, 4, 7);
    before(weights, 2);
    _tile_loadd(6, weights + 128, kPairBytes);
    _tile_dpbf16ps(2, 4, 6);
    before(weights, 3);
    _tile_loadd(7, weights + 192, kPairBytes);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, sums, kPairBytes);
  _tile_stored(1, sums + 16, kPairBytes);
  _tile_stored(2, sums + 32, kPairBytes);
  _tile_stored(3, sums + 48, kPairBytes);
}

// 17 to 32 rows: two by two tiles, the two halves of the panel in turn.
inline void multiply_both(const Block& block, const uint8_t* weights, int step, int steps, bool first,
                          float* sums) {
  for (int half = 0; half < 2; ++half) {
    float* upper = sums + 32 * half;
    float* lower = upper + kTileRows * kPanel;
    start_sums(first, upper, upper + 16, lower, lower + 16);
    const uint8_t* w = weights + 128 * half;
    std::size_t at = block.step * step;
    for (int s = 0; s < steps; ++s, at += block.step, w += kStepBytes) {
      _tile_loadd(4, block.upper_x + at, block.stride);
      _tile_loadd(6, w, kPairBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w + 64, kPairBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, block.lower_x + at, block.stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, upper, kPairBytes);
    _tile_stored(1, upper + 16, kPairBytes);
    _tile_stored(2, lower, kPairBytes);
    _tile_stored(3, lower + 16, kPairBytes);
  }
}

// sums [rows][64] (+)= the block's inputs of `steps` steps from `step` on, times `weights`, which start
// at that step; `first` starts from zero. Tiles must be configured for the block.
inline void multiply(const Block& block, const uint8_t* weights, int step, int steps, bool first,
                     float* sums) {
  if (block.lower > 0) multiply_both(block, weights, step, steps, first, sums);
  else multiply_upper(block, weights, step, steps, first, sums, [](const uint8_t*, int) {});
}

// Rows per item: many share what is read or expanded per panel, but every thread needs some items.
inline int item_rows(const LinearCall& call, int most) {
  const int panels = call.weight->shape.num_panels(), wanted = 3 * num_threads();
  int rows = most;
  while (rows > kBlockRows && panels * ((call.rows + rows - 1) / rows) < wanted) rows /= 2;
  return rows;
}

// body(first, last) for blocks of at most 32 rows.
template <class Body>
inline void for_blocks(const Item& item, Body&& body) {
  for (int first = item.first; first < item.last; first += kBlockRows) {
    const int last = first + kBlockRows < item.last ? first + kBlockRows : item.last;
    body(first, last);
  }
}

}  // namespace

}  // namespace octavo::amx
