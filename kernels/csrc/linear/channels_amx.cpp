// AMX: 8-bit weights of one scale per output channel. Integer sums stay in tiles over all inputs, which
// scales per group do not allow.
#include "linear/amx_tiles.h"
#include "linear/channels_avx512.h"

namespace octavo::amx {
namespace {

constexpr int kItemRows = 256;
constexpr int kQuadBytes = 4 * kPanel;  // four inputs of a panel

// Steps of all inputs: `body(x of the first row, codes)` for each, in order.
struct Steps {
  const int8_t* x;
  const uint8_t* codes;
  std::size_t x_stride, stride;  // bytes from block to block
  int blocks, block, step;       // inputs of a block, and of a step

  template <class Body>
  void each(Body&& body) const {
    for (int b = 0; b < blocks; ++b)
      for (int k = 0; k < block; k += step)
        body(x + x_stride * b + k, codes + stride * b + static_cast<std::size_t>(k) * kPanel);
  }
};

// dots[rows][64] of up to 16 rows: all four columns of tiles at once.
void multiply_upper(const Steps& steps, int32_t* dots) {
  start_sums(true, nullptr, nullptr, nullptr, nullptr);
  steps.each([&](const int8_t* x, const uint8_t* codes) {
    _tile_loadd(4, x, steps.block);
    _tile_loadd(6, codes, kQuadBytes);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, codes + 64, kQuadBytes);
    _tile_dpbsud(1, 4, 7);
    _tile_loadd(6, codes + 128, kQuadBytes);
    _tile_dpbsud(2, 4, 6);
    _tile_loadd(7, codes + 192, kQuadBytes);
    _tile_dpbsud(3, 4, 7);
  });
  _tile_stored(0, dots, kPairBytes);
  _tile_stored(1, dots + 16, kPairBytes);
  _tile_stored(2, dots + 32, kPairBytes);
  _tile_stored(3, dots + 48, kPairBytes);
}

// The same of 17 to 32 rows: two by two tiles, the two halves of the panel in turn.
void multiply_both(const Steps& steps, int32_t* dots) {
  const std::size_t lower_x = static_cast<std::size_t>(kTileRows) * steps.block;
  for (int half = 0; half < 2; ++half) {
    int32_t* upper = dots + 32 * half;
    int32_t* lower = upper + kTileRows * kPanel;
    start_sums(true, nullptr, nullptr, nullptr, nullptr);
    steps.each([&](const int8_t* x, const uint8_t* codes) {
      const uint8_t* w = codes + 128 * half;
      _tile_loadd(4, x, steps.block);
      _tile_loadd(6, w, kQuadBytes);
      _tile_dpbsud(0, 4, 6);
      _tile_loadd(7, w + 64, kQuadBytes);
      _tile_dpbsud(1, 4, 7);
      _tile_loadd(5, x + lower_x, steps.block);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    });
    _tile_stored(0, upper, kPairBytes);
    _tile_stored(1, upper + 16, kPairBytes);
    _tile_stored(2, lower, kPairBytes);
    _tile_stored(3, lower + 16, kPairBytes);
  }
}

void run_item(const LinearCall& call, const ChannelRows& x, const Item& item) {
  const PackedShape& shape = call.weight->shape;
  const int step = std::min(shape.group, 64);
  Tiles tiles;
  for_blocks(item, [&](int first, int last) {
    alignas(64) int32_t dots[kBlockRows * kPanel];
    const int rows = last - first, upper = std::min(rows, kTileRows);
    tiles.configure(upper, rows - upper, step);
    const Steps steps{x.at(0, first),
                      call.weight->panel(item.panel),
                      x.block_stride(),
                      shape.block_bytes(),
                      shape.num_groups(),
                      shape.group,
                      step};
    if (rows > upper) multiply_both(steps, dots);
    else multiply_upper(steps, dots);
    finish_channels(call, x, item.panel, first, rows, dots);
  });
}

}  // namespace

void linear_channels(const LinearCall& call) {
  const ChannelRows x = quantize_channel_rows(call);
  const Items items(call, item_rows(call, kItemRows));
  for_items(items, [&](const Item& item) { run_item(call, x, item); });
}

}  // namespace octavo::amx
