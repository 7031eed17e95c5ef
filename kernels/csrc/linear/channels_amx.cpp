// AMX: weights of one scale per output channel. Integer sums stay in tiles over all inputs, which
// scales per group do not allow.
#include "linear/amx_codes.h"
#include "linear/channels_avx512.h"

namespace octavo::amx {
namespace {

// The panels of an item and what they are multiplied by, for each block of rows in turn. Codes of 4 bits are
// widened once for all rows.
void run_panels(const LinearCall& call, const ChannelRows& x, const Runs::Item& item) {
  const PackedShape& shape = call.weight->shape;
  const int partner = call.partner(), count = item.last_panel - item.first_panel,
            all = partner > 0 ? 2 * count : count;
  const std::size_t wide = std::size_t{kPanel} * shape.inputs;
  uint8_t* const scratch = shape.bits == 4 ? static_cast<uint8_t*>(thread_scratch(wide * all)) : nullptr;
  const auto panel_at = [&](int i) { return item.first_panel + (i < count ? i : i - count + partner); };
  PanelBytes panels[2 * Runs::kMostPanels];
  for (int i = 0; i < all; ++i) panels[i] = panel_bytes(*call.weight, panel_at(i), scratch + wide * i);
  Tiles tiles;
  Finish<int32_t> pending;
  const auto finish = [&](int panel, int row, int rows, int32_t* dots) {
    finish_channels(call, x, panel, row, rows, dots);
  };
  for_blocks(item.first_row, item.last_row, [&](int first, int last) {
    const int rows = last - first, upper = std::min(rows, kTileRows);
    tiles.configure(upper, rows - upper, std::min(shape.group, kStepCodes));
    for (int i = 0; i < all; ++i) {
      const CodeSteps steps{.x = x.at(0, first),
                            .row_stride = static_cast<std::size_t>(shape.group),
                            .codes = panels[i].codes,
                            .block = shape.group,
                            .blocks = shape.num_groups(),
                            .x_stride = x.block_stride(),
                            .stride = panels[i].stride};
      multiply_codes<true>(steps, rows > upper, pending.sums(), [&] { pending.some(finish); });
      pending.rest(finish);
      pending.put(panel_at(i), first, rows);
    }
  });
  pending.rest(finish);
}

}  // namespace

void linear_channels(const LinearCall& call) {
  const ChannelRows x = quantize_channel_rows(call, std::min(call.rows, kBlockRows));
  const Runs runs(call, std::size_t{kPanel} * call.weight->shape.inputs);
  parallel_for(runs.count(), [&](int i) { run_panels(call, x, runs[i]); });
}

}  // namespace octavo::amx
