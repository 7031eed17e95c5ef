#include "linear/amx_tiles.h"
#include "runtime/roofline.h"

namespace octavo::amx {

extern const double bf16_flops_per_round = 4 * 2.0 * 16 * 16 * 32;

float multiply_bf16(int rounds) {
  alignas(64) static const float ones[16 * 16] = {};
  alignas(64) float sums[16 * 16];
  Tiles tiles;
  tiles.configure(kBlockRows);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, ones, 64);
  _tile_loadd(5, ones, 64);
  _tile_loadd(6, ones, 64);
  _tile_loadd(7, ones, 64);
  for (int round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  return sums[0];
}

}  // namespace octavo::amx
