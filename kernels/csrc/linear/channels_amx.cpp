// AMX: weights of one scale per output channel. Integer sums stay in tiles over all inputs, which
// scales per group do not allow.
#include "linear/amx_codes.h"
#include "linear/channels_avx512.h"

namespace octavo::amx {
namespace {

constexpr int kItemRows = 256;

void run_item(const LinearCall& call, const ChannelRows& x, const Item& item) {
  const PackedShape& shape = call.weight->shape;
  const PanelBytes panel = panel_bytes(*call.weight, item.panel);
  Tiles tiles;
  for_blocks(item, [&](int first, int last) {
    alignas(64) int32_t dots[kBlockRows * kPanel];
    const int rows = last - first, upper = std::min(rows, kTileRows);
    tiles.configure(upper, rows - upper, std::min(shape.group, kStepCodes));
    const CodeSteps steps{.x = x.at(0, first),
                          .row_stride = static_cast<std::size_t>(shape.group),
                          .codes = panel.codes,
                          .block = shape.group,
                          .blocks = shape.num_groups(),
                          .x_stride = x.block_stride(),
                          .stride = panel.stride};
    multiply_codes(steps, rows > upper, dots);
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
