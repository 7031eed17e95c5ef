// AMX tiles: configuration of the registers, layout of activations, and products of blocks of rows. Internal
// linkage: see numeric.h.
//
// One product multiplies up to 16 rows of 64 bytes of activations (32 bf16 or 64 codes) by weights of 16
// outputs. Registers: tiles 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights. A block of 17 to 32 rows
// has two tiles of rows: sums 0 and 1 and activations 4 belong to the upper rows, sums 2 and 3 and
// activations 5 to the lower rows. In a block of up to 16 rows, tiles 0 to 3 are the four groups of 16
// outputs.
#pragma once

#include <immintrin.h>

#include "linear/common.h"
#include "runtime/loads_avx512.h"

namespace octavo::amx {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileInputs = 32;
constexpr int kBlockRows = 32;
constexpr int kWordBytes = 4 * kPanel;  // bytes of a panel's weights for four bytes of activations
constexpr int kStepBytes = kTileRows * kWordBytes;  // bytes of a panel's weights for one tile of activations

// Operand of _tile_loadconfig (Intel SDM, LDTILECFG).
struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Orders stores before loads of tiles. The intrinsics do not tell the compiler what tiles read, so the
// compiler may drop or move stores that look unused (GCC 12 does).
inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

// Configures tiles for `upper` and, if not 0, `lower` rows of activations, with `step_bytes` bytes of a row
// at a time.
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

// Owner of the thread's tile registers; releases them in its destructor.
class Tiles {
 public:
  Tiles() = default;
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // Configures tiles for `rows` rows, unless they already are.
  void configure(int rows, int step_bytes = 64) {
    const int upper = std::min(rows, kTileRows), lower = rows - upper;
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

// Operands of a product of up to 32 rows: `runs` runs of `steps` steps. A step is one tile of activations
// with its weights.
struct Steps {
  const void* x;
  std::size_t row_stride, lower;  // bytes to the next row, and from a row to the 16th after it
  std::size_t x_step;             // bytes to the next step
  const uint8_t* weights;
  int steps, step_bytes = kStepBytes;            // bytes of weights per step
  int runs = 1;                                  // number of runs
  std::size_t x_stride = 0, weights_stride = 0;  // bytes to the next run

  // Calls body(x of the first row, weights) for each step, in order.
  template <class Body>
  inline __attribute__((always_inline)) void each(Body&& body) const {
    for (int run = 0; run < runs; ++run) {
      const uint8_t* from = static_cast<const uint8_t*>(x) + x_stride * run;
      const uint8_t* w = weights + weights_stride * run;
      for (int s = 0; s < steps; ++s, from += x_step, w += step_bytes) body(from, w);
    }
  }
};

// Activations in bf16: row-major, or in tiles [rows / 32][inputs / 32][2][16][32], with the two tiles of a
// block adjacent. The tiled layout is faster, because rows that are a power of two apart share few cache
// sets, and because hardware prefetchers follow one stream better than two.
struct Activations {
  const bf16_t* data;
  std::size_t inputs;  // number of inputs, padded to whole steps
  bool tiled;

  static constexpr std::size_t kTile = std::size_t{kTileRows} * kTileInputs;

  // Returns all steps of rows `first` and later, with a panel's weights. In the tiled layout, `first` must be
  // a multiple of kBlockRows.
  Steps steps(int first, const uint8_t* weights) const {
    const std::size_t size = sizeof(bf16_t);
    return {.x = data + first * inputs,
            .row_stride = size * (tiled ? kTileInputs : inputs),
            .lower = size * (tiled ? kTile : kTileRows * inputs),
            .x_step = size * (tiled ? 2 * kTile : kTileInputs),
            .weights = weights,
            .steps = static_cast<int>(inputs / kTileInputs)};
  }
};

// Returns the number of rows that the tiled layout has for `rows` rows.
inline std::size_t tiled_rows(int rows) {
  return static_cast<std::size_t>((rows + kBlockRows - 1) / kBlockRows) * kBlockRows;
}

// Returns the address of step `step` of row `row` in the tiled layout.
inline bf16_t* tiled_place(bf16_t* data, std::size_t inputs, std::size_t row, std::size_t step) {
  const std::size_t pair = row / kBlockRows * (inputs / kTileInputs) + step;
  const std::size_t tile = 2 * pair + row / kTileRows % 2;
  return data + (tile * kTileRows + row % kTileRows) * kTileInputs;
}

inline void start_sums() {
  finish_stores();  // stores of activations and weights
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Keeps the AMX unit awake: on Granite Rapids, TILESTORED takes 0.25 us if there was none for about 0.6 us,
// and the next steps wait for it. So long products store an unused tile now and then.
class Awake {
 public:
  void step(int index) {
    constexpr int kSteps = 8;
    if (index % kSteps == kSteps - 1) _tile_stored(4, spare_, 64);
  }

 private:
  alignas(64) uint8_t spare_[kTileRows * 64];
};

// Prefetches a quarter of a step's weights into L2 while earlier weights are multiplied, because tile loads
// alone keep too few lines in flight.
inline __attribute__((always_inline)) void fetch_quarter(const uint8_t* weights, int quarter) {
  constexpr int kAhead = 2048;  // bytes
  const uint8_t* const from = weights + kAhead + kStepBytes / 4 * quarter;
  for (int at = 0; at < kStepBytes / 4; at += 64)
    _mm_prefetch(reinterpret_cast<const char*>(from + at), _MM_HINT_T1);
}

// Adds the product of tiles `x` and `w` to tile `sums`: bf16 with float32 sums, or signed by unsigned codes
// with int32 sums. It is a macro, because the intrinsics need literal tile numbers.
#define OCTAVO_ADD_TILES(sums, x, w)                                    \
  if constexpr (std::is_same_v<Sum, float>) _tile_dpbf16ps(sums, x, w); \
  else _tile_dpbsud(sums, x, w)

// Computes out [rows][64] of up to 16 rows, with the sums of all 64 outputs in four tiles. With kFetches,
// weights are prefetched in memory order (fetch_quarter), and steps have kStepBytes.
template <bool kFetches, class Sum, class Between>
inline void multiply_upper(const Steps& steps, Sum* out, Between&& between) {
  Awake awake;
  int index = 0;
  start_sums();
  steps.each([&](const uint8_t* x, const uint8_t* w) __attribute__((always_inline)) {
    if constexpr (kFetches) fetch_quarter(w, 0);
    _tile_loadd(4, x, steps.row_stride);
    _tile_loadd(6, w, kWordBytes);
    OCTAVO_ADD_TILES(0, 4, 6);
    if constexpr (kFetches) fetch_quarter(w, 1);
    _tile_loadd(7, w + 64, kWordBytes);
    OCTAVO_ADD_TILES(1, 4, 7);
    if constexpr (kFetches) fetch_quarter(w, 2);
    _tile_loadd(6, w + 128, kWordBytes);
    OCTAVO_ADD_TILES(2, 4, 6);
    if constexpr (kFetches) fetch_quarter(w, 3);
    _tile_loadd(7, w + 192, kWordBytes);
    OCTAVO_ADD_TILES(3, 4, 7);
    awake.step(index++);
    between();
  });
  _tile_stored(0, out, kWordBytes);
  _tile_stored(1, out + 16, kWordBytes);
  _tile_stored(2, out + 32, kWordBytes);
  _tile_stored(3, out + 48, kWordBytes);
}

// Computes out [rows][64] of 17 to 32 rows in two by two tiles, one half of the panel after the other. Tiles
// are loaded as streams, because loads from L2 are a quarter faster if data need not be kept in L1.
template <class Sum, class Between>
inline void multiply_both(const Steps& steps, Sum* out, Between&& between) {
  Awake awake;
  for (int half = 0; half < 2; ++half) {
    Sum* const upper = out + 32 * half;
    Sum* const lower = upper + kTileRows * kPanel;
    int index = 0;
    start_sums();
    steps.each([&](const uint8_t* x, const uint8_t* weights) __attribute__((always_inline)) {
      const uint8_t* const w = weights + 128 * half;
      _tile_stream_loadd(4, x, steps.row_stride);
      _tile_stream_loadd(6, w, kWordBytes);
      OCTAVO_ADD_TILES(0, 4, 6);
      _tile_stream_loadd(7, w + 64, kWordBytes);
      OCTAVO_ADD_TILES(1, 4, 7);
      _tile_stream_loadd(5, x + steps.lower, steps.row_stride);
      OCTAVO_ADD_TILES(2, 5, 6);
      OCTAVO_ADD_TILES(3, 5, 7);
      awake.step(index++);
      between();
    });
    _tile_stored(0, upper, kWordBytes);
    _tile_stored(1, upper + 16, kWordBytes);
    _tile_stored(2, lower, kWordBytes);
    _tile_stored(3, lower + 16, kWordBytes);
  }
}
#undef OCTAVO_ADD_TILES

// Computes the products of `rows` rows with a panel, out [rows][64], and calls between() after each step.
// Tiles must be configured for these rows.
template <bool kFetches, class Sum, class Between>
inline void multiply(const Steps& steps, int rows, Sum* out, Between&& between) {
  if (rows > kTileRows) multiply_both(steps, out, between);
  else multiply_upper<kFetches>(steps, out, between);
}

// Sums [rows][64] of one block and panel. While the next sums are computed, these are turned into results a
// few rows at a time, because writing all at once would stall the tiles.
template <class Sum>
class Finish {
 public:
  // Calls finish(panel, first row, rows, sums) for all sums that `put` got, in that order.
  template <class Body>
  void some(Body&& finish) {
    constexpr int kRows = 2;  // rows finished after each step
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
  // Returns memory for the next sums. `put` first finishes the rest of the last sums, then takes these.
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

// Calls body(first, last) for all rows in blocks of at most 32.
template <class Body>
inline void for_blocks(int first_row, int last_row, Body&& body) {
  for (int first = first_row; first < last_row; first += kBlockRows)
    body(first, std::min(first + kBlockRows, last_row));
}

// Prefetches the next weights into L2, evenly over all steps, because tiles would otherwise wait for DRAM. It
// alternates between several parts of the weights: during tile loads, the hardware prefetcher follows one
// memory page slowly, but it can follow many.
class Ahead {
 public:
  // Starts prefetching `bytes` bytes at `from` over `steps` calls of step(); nothing if `from` is null.
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

  const uint8_t* at_ = nullptr;                // next address in the first part
  std::size_t part_ = 0;                       // bytes per part
  int steps_ = 1, per_step_ = 0, passed_ = 0;  // prefetches `per_step_` lines of each part per step
};

}  // namespace

}  // namespace octavo::amx
