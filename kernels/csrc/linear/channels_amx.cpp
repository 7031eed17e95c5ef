// AMX: weights with one scale per output channel. Integer sums can stay in tiles over all inputs; group
// scales would have to be applied in between.
#include "linear/amx_work.h"
#include "linear/channels_avx512.h"

namespace octavo::amx {
namespace {

constexpr int kStepCodes = 64;  // most inputs in a tile of activations

// Multiplies each panel of an item by all blocks of rows; 4-bit codes are widened once for all blocks.
void run_panels(const LinearCall& call, const ChannelRows& x, const Work& work, const Work::Item& item) {
  const PackedShape& shape = call.weight->shape;
  const int blocks = (item.last_row - item.first_row + kBlockRows - 1) / kBlockRows;
  const int step = std::min(shape.group, kStepCodes), steps = shape.group / step;
  const std::size_t wide_bytes = shape.bits == 4 ? std::size_t{kPanel} * shape.inputs : 0;
  uint8_t* const scratch = static_cast<uint8_t*>(thread_scratch(wide_bytes));
  // A single tile of rows reads 8-bit codes directly and prefetches them in memory order.
  const bool one_tile = call.rows <= kTileRows && shape.bits == 8 && shape.group >= kStepCodes;
  Tiles tiles;
  Ahead ahead;
  Finish<int32_t> pending;
  const auto finish = [&](int panel, int row, int rows, int32_t* dots) {
    finish_channels(call, x, panel, row, rows, dots);
  };
  work.each_panel(*call.weight, item, [&](int panel, const uint8_t* next) {
    const PanelBytes bytes = panel_bytes(*call.weight, panel, scratch);
    if (!one_tile) ahead.start(next, shape.panel_bytes(), 2 * shape.num_groups() * steps * blocks);
    for_blocks(item.first_row, item.last_row, [&](int first, int last) {
      tiles.configure(last - first, step);
      const std::size_t row_stride = shape.group;
      const Steps products{.x = x.at(0, first),
                           .row_stride = row_stride,
                           .lower = kTileRows * row_stride,
                           .x_step = static_cast<std::size_t>(step),
                           .weights = bytes.codes,
                           .steps = steps,
                           .step_bytes = step * kPanel,
                           .runs = shape.num_groups(),
                           .x_stride = x.block_stride(),
                           .weights_stride = bytes.stride};
      const auto between = [&] {
        pending.some(finish);
        ahead.step();
      };
      if (one_tile) multiply<true>(products, last - first, pending.sums(), between);
      else multiply<false>(products, last - first, pending.sums(), between);
      pending.rest(finish);
      pending.put(panel, first, last - first);
    });
  });
  pending.rest(finish);
}

}  // namespace

void linear_channels(const LinearCall& call) {
  const ChannelRows x = channel_rows(call, std::min(call.rows, kBlockRows));
  const Work work(call, call.weight->shape.inputs);
  work.run([&](int first, int last) { quantize_channel_rows(call, x, first, last); },
           [&](const Work::Item& item) { run_panels(call, x, work, item); });
}

}  // namespace octavo::amx
