#include "attention/tiles_amx.h"

#include <algorithm>

#include "attention/sides_avx512.h"
#include "linear/amx_tiles.h"

namespace octavo::amx {
namespace {

constexpr int kTileFloats = kTileRows * 16;
constexpr int kTileValues = kTileRows * kTileInputs;
constexpr int kRowBytes = 64;  // of an AMX tile
constexpr int kPositions = 64;

// Transposes products, [16 positions][16 rows], into the rows' scores.
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

// Prefetches one of `steps` equal shares of a block's rows; `step` counts from 0.
inline void prefetch_share(const uint8_t* rows, int64_t stride, int step, int steps) {
  if (rows == nullptr) return;
  const int64_t bytes = kTileRows * stride / steps;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(rows + step * bytes + i, 0, 2);
}

// Scores blocks `block` and `block` + 1 for 32 rows: two tiles of keys times two tiles of queries give four
// tiles of products.
void score_two(const KeyBlocks& keys, int block, const uint16_t* queries, int steps, bool ahead,
               float* products) {
  const uint8_t *const first = keys.rows[block], *const second = keys.rows[block + 1];
  const uint16_t* lower = queries + size_t(steps) * kTileValues;
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < steps; ++step) {
    if (ahead) {
      prefetch_share(keys.next[block], keys.stride, step, steps);
      prefetch_share(keys.next[block + 1], keys.stride, step, steps);
    }
    _tile_loadd(4, first + step * kRowBytes, keys.stride);
    _tile_loadd(6, queries + size_t(step) * kTileValues, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, lower + size_t(step) * kTileValues, kRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, second + step * kRowBytes, keys.stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, products, kRowBytes);
  _tile_stored(1, products + kTileFloats, kRowBytes);
  _tile_stored(2, products + 2 * kTileFloats, kRowBytes);
  _tile_stored(3, products + 3 * kTileFloats, kRowBytes);
}

// Scores all four blocks for 16 rows, one after the other in memory order. Prefetches alternate between the
// next tile's blocks, because the hardware prefetchers follow several memory pages better than one.
void score_four(const KeyBlocks& keys, const uint16_t* queries, int steps, bool ahead, float* products) {
  finish_stores();
  for (int b = 0; b < 4; ++b, products += kTileFloats) {
    const uint8_t* const rows = keys.rows[b];
    _tile_zero(0);
    for (int step = 0; step < steps; ++step) {
      for (int i = 0; ahead && i < 4; ++i)
        prefetch_share(keys.next[i], keys.stride, steps * b + step, 4 * steps);
      _tile_loadd(6, queries + size_t(step) * kTileValues, kRowBytes);
      _tile_loadd(4, rows + step * kRowBytes, keys.stride);
      _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, products, kRowBytes);
  }
  finish_stores();
}

// Accumulates all vectors for up to 16 rows, or for up to 32 with kLower.
template <bool kLower>
void add_rows(const uint16_t* weights, const uint16_t* values, int parts, uint32_t halves, int64_t stride,
              float* accumulators) {
  constexpr int64_t kWeightBytes = kPositions * sizeof(uint16_t);
  finish_stores();
  for (int part = 0; part < parts; ++part, values += 4 * kTileValues, accumulators += 32) {
    float* const below = accumulators + kTileRows * stride / int64_t(sizeof(float));
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
  finish_stores();
}

}  // namespace

void score_tile(const KeyBlocks& keys, uint32_t blocks, const uint16_t* queries, int steps, int num_rows,
                float* scores) {
  alignas(64) float products[4 * kTileFloats];
  Tiles tiles;
  tiles.configure(kBlockRows);
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
      score_two(keys, b, from, steps, row == 0, products);
      for (int i = 0; i < 2; ++i) {
        if (!(blocks >> (b + i) & 1)) continue;
        turn(products + 2 * i * kTileFloats, upper, to + 16 * (b + i));
        turn(products + (2 * i + 1) * kTileFloats, lower, to + kTileRows * kPositions + 16 * (b + i));
      }
    }
  }
}

HeldTiles::~HeldTiles() { _tile_release(); }

void HeldTiles::configure(int upper, int lower) {
  if (upper != upper_ || lower != lower_) load_config(upper_ = upper, lower_ = lower);
}

void WeightedSum::add(const uint16_t* weights, const uint16_t* values, int parts, uint32_t halves,
                      int64_t stride, float* accumulators) {
  const int64_t width = stride / int64_t(sizeof(float));
  for (int row = 0; row < num_rows_; row += 2 * kTileRows) {
    const int upper = std::min(kTileRows, num_rows_ - row),
              lower = std::min(kTileRows, num_rows_ - row - upper);
    configure(upper, lower);
    (lower > 0 ? add_rows<true> : add_rows<false>)(weights + size_t(row) * kPositions, values, parts, halves,
                                                   stride, accumulators + row * width);
  }
}

namespace {

// Multiplies one tile of rows, or two with kLower, by two blocks of positions.
template <bool kLower>
void multiply_bytes(const int8_t* upper, const int8_t* lower, int64_t stride, int dim, const uint8_t* keys,
                    int32_t* products) {
  constexpr int kStep = 64, kPanelStep = kStep / 4;  // dims per tile; panel rows per step
  constexpr int64_t kPanelStride = 4 * kPositions, kStride = kPositions * sizeof(int32_t);
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kLower) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int d = 0; d < dim; d += kStep, keys += kPanelStep * kPanelStride) {
    _tile_loadd(4, upper + d, stride);
    _tile_loadd(6, keys, kPanelStride);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, keys + kRowBytes, kPanelStride);
    _tile_dpbsud(1, 4, 7);
    if constexpr (kLower) {
      _tile_loadd(5, lower + d, stride);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
  }
  _tile_stored(0, products, kStride);
  _tile_stored(1, products + 16, kStride);
  if constexpr (kLower) {
    _tile_stored(2, products + kByteProducts, kStride);
    _tile_stored(3, products + kByteProducts + 16, kStride);
  }
}

}  // namespace

// With two parts, both tiles of rows have all rows (one part each).
template <int kParts>
void ByteProducts<kParts>::configure_rows(int num_rows) {
  if (kParts == 2) return configure(num_rows, num_rows);
  configure(std::min(num_rows, kTileRows), num_rows - std::min(num_rows, kTileRows));
}

template <int kParts>
void ByteProducts<kParts>::score(const int8_t* queries, int num_rows, int dim, const void* panel,
                                 int32_t* products) {
  configure_rows(num_rows);
  const uint8_t* const keys = static_cast<const uint8_t*>(panel);
  const int8_t* const lower = queries + (kParts == 2 ? dim : kTileRows * dim);
  const auto body = lower_ > 0 ? multiply_bytes<true> : multiply_bytes<false>;
  finish_stores();
  for (int first = 0; first < kPositions; first += 32)
    body(queries, lower, kParts * dim, dim, keys + 4 * first, products + first);
  finish_stores();
}

template <int kParts>
void ByteProducts<kParts>::load_weights(const uint8_t* weights, int num_rows) {
  configure_rows(num_rows);
  finish_stores();
  _tile_loadd(4, weights, kParts * kPositions);
  if (kParts == 2) _tile_loadd(5, weights + kPositions, kParts * kPositions);
  else if (lower_ > 0) _tile_loadd(5, weights + kTileRows * kPositions, kParts * kPositions);
}

template <int kParts>
void ByteProducts<kParts>::weigh(const void* panel, int64_t stride, int32_t* products) {
  constexpr int64_t kStride = 32 * sizeof(int32_t);
  constexpr int kLower = kByteRows * 32;
  const uint8_t* const values = static_cast<const uint8_t*>(panel);
  finish_stores();
  _tile_loadd(6, values, stride);
  _tile_loadd(7, values + kRowBytes, stride);
  _tile_zero(0);
  _tile_dpbusd(0, 4, 6);
  _tile_zero(1);
  _tile_dpbusd(1, 4, 7);
  _tile_stored(0, products, kStride);
  _tile_stored(1, products + 16, kStride);
  if (lower_ > 0) {
    _tile_zero(2);
    _tile_dpbusd(2, 5, 6);
    _tile_zero(3);
    _tile_dpbusd(3, 5, 7);
    _tile_stored(2, products + kLower, kStride);
    _tile_stored(3, products + kLower + 16, kStride);
  }
  finish_stores();
}

template class ByteProducts<1>;
template class ByteProducts<2>;

}  // namespace octavo::amx
