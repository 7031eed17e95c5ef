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

// Tiles of `upper` and, if there are any, `lower` rows: steps of `step_bytes` per row of activations, four
// bytes per row of weights.
inline void load_config(int upper, int lower, int step_bytes = 64) {
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
}

// The tile registers, in use for the life of the object.
class Tiles {
 public:
  Tiles() = default;
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // As load_config has it, unless that is what there is.
  void configure(int upper, int lower, int step_bytes = 64) {
    if (upper == upper_ && lower == lower_ && step_bytes == step_bytes_) return;
    load_config(upper, lower, step_bytes);
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

// Activations in bf16: row-major, or tile after tile: [rows / 32][inputs / 32][2][16][32], the two tiles of a
// block side by side. Rows a power of two apart would all fall into the same few sets of the cache, and a
// prefetcher follows one stream better than two.
struct Activations {
  const bf16_t* data;
  std::size_t inputs;  // padded to whole steps
  bool tiled;

  static constexpr std::size_t kTile = std::size_t{kTileRows} * kTileInputs;

  // In tiles, `first` is a multiple of kBlockRows.
  Block block(int first, int last) const {
    const int rows = last - first, upper = rows < kTileRows ? rows : kTileRows;
    const bf16_t* x = data + first * inputs;
    return {x,
            x + (tiled ? kTile : kTileRows * inputs),
            tiled ? kTileInputs * sizeof(bf16_t) : inputs * sizeof(bf16_t),
            tiled ? 2 * kTile : kTileInputs,
            upper,
            rows - upper};
  }
};

// Rows of the tiled layout that hold `rows`.
inline std::size_t tiled_rows(int rows) {
  return static_cast<std::size_t>((rows + kBlockRows - 1) / kBlockRows) * kBlockRows;
}

// Where step `step` of row `row` goes in the tiled layout.
inline bf16_t* tiled_place(bf16_t* data, std::size_t inputs, std::size_t row, std::size_t step) {
  const std::size_t pair = row / kBlockRows * (inputs / kTileInputs) + step;
  const std::size_t tile = 2 * pair + row / kTileRows % 2;
  return data + (tile * kTileRows + row % kTileRows) * kTileInputs;
}

// Values [at, at + 32) of an array as bf16.
inline __m512i load32_bf16(const void* p, Float type, std::size_t at) {
  if (type == Float::bf16) return _mm512_loadu_si512(static_cast<const bf16_t*>(p) + at);
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(load16(p, type, at + 16), load16(p, type, at)));
}

inline void start_sums() {
  finish_stores();  // of activations and weights
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// TILESTORED takes a quarter of a microsecond where none went before it for some 0.6 (Granite Rapids): what
// the next steps would do meanwhile waits. So long products store a tile now and then that nobody reads.
class Awake {
 public:
  void step(int index) {
    constexpr int kSteps = 8;
    if (index % kSteps == kSteps - 1) _tile_stored(4, spare_, 64);
  }

 private:
  alignas(64) uint8_t spare_[kTileRows * 64];
};

// What multiplications have to do besides, after each step: nothing.
struct Nothing {
  void operator()() const {}
};

// What is kFar need not stay in the first-level cache: loads from the second are faster so, by a
// quarter. (The intrinsics want literal numbers.)
template <bool kFar, int kTile>
inline __attribute__((always_inline)) void load_tile(const void* from, std::size_t stride) {
  static_assert(kTile >= 4 && kTile <= 7);
  if constexpr (kFar) {
    if constexpr (kTile == 4) _tile_stream_loadd(4, from, stride);
    if constexpr (kTile == 5) _tile_stream_loadd(5, from, stride);
    if constexpr (kTile == 6) _tile_stream_loadd(6, from, stride);
    if constexpr (kTile == 7) _tile_stream_loadd(7, from, stride);
  } else {
    if constexpr (kTile == 4) _tile_loadd(4, from, stride);
    if constexpr (kTile == 5) _tile_loadd(5, from, stride);
    if constexpr (kTile == 6) _tile_loadd(6, from, stride);
    if constexpr (kTile == 7) _tile_loadd(7, from, stride);
  }
}

// A quarter of a step's bytes of weights, prefetched into L2 while those before are multiplied: loads of
// tiles alone keep too few lines under way.
inline __attribute__((always_inline)) void fetch_quarter(const uint8_t* weights, int quarter) {
  constexpr int kAhead = 2048;  // bytes
  const uint8_t* const from = weights + kAhead + kStepBytes / 4 * quarter;
  for (int at = 0; at < kStepBytes / 4; at += 64)
    _mm_prefetch(reinterpret_cast<const char*>(from + at), _MM_HINT_T1);
}

// Up to 16 rows: all four columns of tiles at once.
template <bool kFar, class Between>
inline void multiply_upper(const Block& block, const uint8_t* weights, int step, int steps, float* sums,
                           Between&& between) {
  Awake awake;
  start_sums();
  const bf16_t* x = block.upper_x + block.step * step;
  for (int s = 0; s < steps; ++s, x += block.step, weights += kStepBytes) {
    if constexpr (kFar) fetch_quarter(weights, 0);
    _tile_loadd(4, x, block.stride);
    _tile_loadd(6, weights, kPairBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kFar) fetch_quarter(weights, 1);
    _tile_loadd(7, weights + 64, kPairBytes);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kFar) fetch_quarter(weights, 2);
    _tile_loadd(6, weights + 128, kPairBytes);
    _tile_dpbf16ps(2, 4, 6);
    if constexpr (kFar) fetch_quarter(weights, 3);
    _tile_loadd(7, weights + 192, kPairBytes);
    _tile_dpbf16ps(3, 4, 7);
    awake.step(s);
    between();
  }
  _tile_stored(0, sums, kPairBytes);
  _tile_stored(1, sums + 16, kPairBytes);
  _tile_stored(2, sums + 32, kPairBytes);
  _tile_stored(3, sums + 48, kPairBytes);
}

// 17 to 32 rows: two by two tiles, the two halves of the panel in turn.
template <bool kFar, class Between>
inline void multiply_both(const Block& block, const uint8_t* weights, int step, int steps, float* sums,
                          Between&& between) {
  Awake awake;
  for (int half = 0; half < 2; ++half) {
    start_sums();
    const uint8_t* w = weights + 128 * half;
    std::size_t at = block.step * step;
    for (int s = 0; s < steps; ++s, at += block.step, w += kStepBytes) {
      load_tile<kFar, 4>(block.upper_x + at, block.stride);
      load_tile<kFar, 6>(w, kPairBytes);
      _tile_dpbf16ps(0, 4, 6);
      load_tile<kFar, 7>(w + 64, kPairBytes);
      _tile_dpbf16ps(1, 4, 7);
      load_tile<kFar, 5>(block.lower_x + at, block.stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      awake.step(s);
      between();
    }
    float* upper = sums + 32 * half;
    float* lower = upper + kTileRows * kPanel;
    _tile_stored(0, upper, kPairBytes);
    _tile_stored(1, upper + 16, kPairBytes);
    _tile_stored(2, lower, kPairBytes);
    _tile_stored(3, lower + 16, kPairBytes);
  }
}

// sums [rows][64] = the block's inputs of `steps` steps from `step` on, times `weights`, which start at that
// step; between() after each step. Tiles must be configured for the block. kFar: what is loaded is too much
// for the first-level cache.
template <bool kFar = false, class Between = Nothing>
inline void multiply(const Block& block, const uint8_t* weights, int step, int steps, float* sums,
                     Between&& between = {}) {
  if (block.lower > 0) multiply_both<kFar>(block, weights, step, steps, sums, between);
  else multiply_upper<kFar>(block, weights, step, steps, sums, between);
}

// Sums [rows][64] of one block and panel that become results while the next are multiplied, some rows at a
// time: lines of results come from far, and written all at once, tiles would wait for them.
template <class Sum>
class Finish {
 public:
  // finish(panel, first row, rows, sums), in the order in which blocks came.
  template <class Body>
  void some(Body&& finish) {
    constexpr int kRows = 2;  // after each step
    if (left_ == 0) return;
    const int rows = std::min(kRows, left_);
    finish(panel_, row_, rows, next_);
    row_ += rows, left_ -= rows, next_ += rows * kPanel;
  }
  template <class Body>
  void rest(Body&& finish) {
    if (left_ > 0) finish(panel_, row_, left_, next_);
    left_ = 0;
  }
  // Where the next sums go; they are handed over by `put`, after the rest of the last.
  Sum* sums() { return sums_[turn_]; }
  void put(int panel, int row, int rows) {
    panel_ = panel, row_ = row, left_ = rows, next_ = sums_[turn_];
    turn_ ^= 1;
  }

 private:
  alignas(64) Sum sums_[2][kBlockRows * kPanel];
  int turn_ = 0, panel_ = 0, row_ = 0, left_ = 0;
  Sum* next_ = nullptr;
};

// Rows per item: many share what is read or expanded per panel, but every thread needs some items.
inline int item_rows(const LinearCall& call, int most) {
  const int panels = call.weight->shape.num_panels(), wanted = 3 * num_threads();
  int rows = most;
  while (rows > kBlockRows && panels * ((call.rows + rows - 1) / rows) < wanted) rows /= 2;
  return rows;
}

// body(first, last) for blocks of at most 32 rows.
template <class Body>
inline void for_blocks(int first_row, int last_row, Body&& body) {
  for (int first = first_row; first < last_row; first += kBlockRows) {
    const int last = first + kBlockRows < last_row ? first + kBlockRows : last_row;
    body(first, last);
  }
}

template <class Body>
inline void for_blocks(const Item& item, Body&& body) {
  for_blocks(item.first, item.last, body);
}

// Weights that come next, prefetched into L2, evenly over all steps: read at once when they are needed, they
// come at DRAM's rate, and tiles wait. Parts of them are prefetched by turns: beside loads of tiles the
// processor's own prefetcher follows what is read in one page of memory only slowly, but it follows many
// pages.
class Ahead {
 public:
  // `bytes` from `from` on, nothing if it is null, over `steps` calls of step().
  void start(const uint8_t* from, std::size_t bytes, int steps) {
    at_ = from, part_ = (bytes / 64 + kParts - 1) / kParts * 64;
    steps_ = steps, passed_ = 0;
    per_step_ = from == nullptr ? 0 : static_cast<int>(part_ / 64);
  }

  inline __attribute__((always_inline)) void step() {
    for (passed_ += per_step_; passed_ >= steps_; passed_ -= steps_, at_ += 64)
      for (int part = 0; part < kParts; ++part)
        _mm_prefetch(reinterpret_cast<const char*>(at_ + part_ * part), _MM_HINT_T1);
  }

 private:
  static constexpr int kParts = 8;

  const uint8_t* at_ = nullptr;                // in the first part
  std::size_t part_ = 0;                       // bytes
  int steps_ = 1, per_step_ = 0, passed_ = 0;  // `per_step_` lines of each part in `steps_` steps
};

}  // namespace

}  // namespace octavo::amx
