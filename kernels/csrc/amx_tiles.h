// AMX tile registers of a thread. Internal linkage: see numeric.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace octavo::amx {
namespace {

constexpr int kTileRows = 16;

// The layout _tile_loadconfig wants (Intel SDM, LDTILECFG).
struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Configured for the life of the object.
//
// Tiles 0..3 hold sums, 4 and 5 activations, 6 and 7 weights. With two tiles of rows (`lower` > 0),
// 0, 1 and 4 belong to the upper, 2, 3 and 5 to the lower; else 0..3 are four columns of the upper one.
class Tiles {
 public:
  Tiles() = default;
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  void configure(int upper, int lower) {
    if (upper == upper_ && lower == lower_) return;
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = kTileRows;
    }
    config.rows[0] = config.rows[1] = config.rows[4] = static_cast<uint8_t>(upper);
    config.rows[2] = config.rows[3] = config.rows[5] = static_cast<uint8_t>(lower > 0 ? lower : upper);
    _tile_loadconfig(&config);
    upper_ = upper;
    lower_ = lower;
  }

 private:
  int upper_ = 0;
  int lower_ = 0;
};

}  // namespace
}  // namespace octavo::amx
