// AMX: eight tiles of up to 16 rows of 64 bytes per thread, palette 1.
#pragma once

#include "emulated_vectors.h"

// An emulated kernel spends most of its time in two functions; only these are optimized for speed.
#if defined(__clang__)
#define OCTAVO_VECTORIZED
#else
#define OCTAVO_VECTORIZED __attribute__((noinline, optimize("O3")))
#endif

namespace x86_emulator {

struct Tile {
  int rows, row_bytes;
  alignas(64) uint8_t data[16][64];
};

struct TileUnit {
  bool configured = false;
  Tile tiles[8] = {};

  Tile& use(int tile) {
    if (!configured) fault("a tile is used before LDTILECFG");
    if (tile < 0 || tile > 7) fault("there are tiles 0 to 7");
    if (tiles[tile].rows == 0) fault("a tile is used that its configuration leaves out");
    return tiles[tile];
  }
};

inline thread_local TileUnit tile_unit;

// Checks the shapes of C += A B: C [m, n], A [m, k], B [k, n], with k and n in groups of four bytes.
OCTAVO_EMULATED void check_product(const Tile& c, const Tile& a, const Tile& b) {
  if (a.rows != c.rows || b.row_bytes != c.row_bytes || a.row_bytes != 4 * b.rows)
    fault("the shapes of three tiles do not fit");
}

// Sets the unused rest of each row of a result to zero.
OCTAVO_EMULATED void zero_rest(Tile& tile) {
  for (int row = 0; row < 16; ++row) {
    const int from = row < tile.rows ? tile.row_bytes : 0;
    std::memset(tile.data[row] + from, 0, size_t(64 - from));
  }
}

// TDPBF16PS: even and odd elements are accumulated separately, by fused multiply-adds from zero. The two
// sums are added, then the result and the tile. Rounding is to nearest even, and all subnormals are zero.
OCTAVO_VECTORIZED inline void multiply_bf16(int to, int from, int with) {
  Tile &c = tile_unit.use(to), &a = tile_unit.use(from), &b = tile_unit.use(with);
  check_product(c, a, b);
  const int columns = c.row_bytes / 4;
  for (int m = 0; m < c.rows; ++m) {
    float even[16] = {}, odd[16] = {}, sums[16];
    for (int k = 0; k < b.rows; ++k) {
      uint32_t x, y[16];
      std::memcpy(&x, a.data[m] + 4 * k, 4);
      std::memcpy(y, b.data[k], 64);
      for (int n = 0; n < columns; ++n) {
        even[n] = flushed_fma(lower_bf16(x), lower_bf16(y[n]), even[n]);
        odd[n] = flushed_fma(upper_bf16(x), upper_bf16(y[n]), odd[n]);
      }
    }
    std::memcpy(sums, c.data[m], 64);
    for (int n = 0; n < columns; ++n) sums[n] = flush(flush(sums[n]) + flush(even[n] + odd[n]));
    std::memcpy(c.data[m], sums, size_t(c.row_bytes));
  }
  zero_rest(c);
}

// TDPBSSD and similar instructions: products of bytes of A (type X) and B (type Y), sums modulo 2^32.
template <class X, class Y>
OCTAVO_VECTORIZED inline void multiply_bytes(int to, int from, int with) {
  Tile &c = tile_unit.use(to), &a = tile_unit.use(from), &b = tile_unit.use(with);
  check_product(c, a, b);
  const int columns = c.row_bytes / 4;
  for (int m = 0; m < c.rows; ++m) {
    uint32_t sums[16];
    std::memcpy(sums, c.data[m], 64);
    for (int k = 0; k < b.rows; ++k)
      for (int n = 0; n < columns; ++n)
        for (int byte = 0; byte < 4; ++byte)
          sums[n] += uint32_t(int32_t(X(a.data[m][4 * k + byte])) * int32_t(Y(b.data[k][4 * n + byte])));
    std::memcpy(c.data[m], sums, size_t(c.row_bytes));
  }
  zero_rest(c);
}

}  // namespace x86_emulator

// Byte 0: palette; byte 1: first row; bytes 16 to 47: bytes per row of each tile, 16 bits; then their rows.
OCTAVO_EMULATED void _tile_loadconfig(const void* from) {
  using namespace x86_emulator;
  uint8_t config[64];
  std::memcpy(config, from, 64);
  if (config[0] != 1 || config[1] != 0) fault("only palette 1, from row 0 on, is emulated");
  for (int i = 2; i < 16; ++i)
    if (config[i] != 0) fault("a reserved byte of a tile configuration is not zero");
  for (int tile = 0; tile < 16; ++tile) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, config + 16 + 2 * tile, 2);
    const int rows = config[48 + tile];
    if (row_bytes > 64 || rows > 16 || (row_bytes == 0) != (rows == 0) || (tile > 7 && rows != 0))
      fault("a tile has up to 16 rows of up to 64 bytes");
    if (tile < 8) tile_unit.tiles[tile] = {rows, row_bytes, {}};
  }
  tile_unit.configured = true;
}
OCTAVO_EMULATED void _tile_release() { x86_emulator::tile_unit = {}; }
OCTAVO_EMULATED void _tile_zero(int tile) {
  std::memset(x86_emulator::tile_unit.use(tile).data, 0, sizeof(x86_emulator::Tile::data));
}
OCTAVO_EMULATED void _tile_loadd(int number, const void* from, size_t stride) {
  x86_emulator::Tile& tile = x86_emulator::tile_unit.use(number);
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(tile.data[row], static_cast<const char*>(from) + row * stride, size_t(tile.row_bytes));
  x86_emulator::zero_rest(tile);
}
// A hint that the data need not stay in the first-level cache.
OCTAVO_EMULATED void _tile_stream_loadd(int number, const void* from, size_t stride) {
  _tile_loadd(number, from, stride);
}
OCTAVO_EMULATED void _tile_stored(int number, void* to, size_t stride) {
  const x86_emulator::Tile& tile = x86_emulator::tile_unit.use(number);
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, tile.data[row], size_t(tile.row_bytes));
}
OCTAVO_EMULATED void _tile_dpbf16ps(int c, int a, int b) { x86_emulator::multiply_bf16(c, a, b); }
OCTAVO_EMULATED void _tile_dpbssd(int c, int a, int b) { x86_emulator::multiply_bytes<int8_t, int8_t>(c, a, b); }
OCTAVO_EMULATED void _tile_dpbsud(int c, int a, int b) { x86_emulator::multiply_bytes<int8_t, uint8_t>(c, a, b); }
OCTAVO_EMULATED void _tile_dpbusd(int c, int a, int b) { x86_emulator::multiply_bytes<uint8_t, int8_t>(c, a, b); }
OCTAVO_EMULATED void _tile_dpbuud(int c, int a, int b) { x86_emulator::multiply_bytes<uint8_t, uint8_t>(c, a, b); }
