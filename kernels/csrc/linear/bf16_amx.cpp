// bf16 weights on AMX tiles.
//
// Tiles are used for one row too: they outrun DRAM even then, and so a row's sums are the same in any
// batch. They stay in tiles over all inputs: adding up in memory chunk by chunk, whose weights would then be
// in the first-level cache, takes longer than loading weights and rows from the second.
#include "linear/amx_results.h"

namespace octavo::amx {
namespace {

// From this number of rows on it pays to copy them into tiles.
constexpr int kTiledRows = 8;

Activations arrange(const LinearCall& call) {
  const std::size_t padded = call.weight->shape.padded_inputs();
  const bf16_t* rows = bf16_rows(call);
  if (call.rows < kTiledRows) return {rows, padded, false};
  const std::size_t bytes = sizeof(bf16_t) * padded * tiled_rows(call.rows);
  bf16_t* tiles = static_cast<bf16_t*>(thread_scratch(bytes, 2));
  // The tiles of a block are one thread's.
  parallel_for((call.rows + kBlockRows - 1) / kBlockRows, [&](int block) {
    const int first = block * kBlockRows, last = std::min(call.rows, first + kBlockRows);
    for (std::size_t step = 0; step < padded / kTileInputs; ++step)
      for (int row = first; row < last; ++row)
        _mm512_storeu_si512(tiled_place(tiles, padded, row, step),
                            _mm512_loadu_si512(rows + row * padded + step * kTileInputs));
  });
  return {tiles, padded, true};
}

// The panels of an item, and for each all blocks of rows.
void run_panels(const LinearCall& call, const Activations& x, const Runs& runs, int index) {
  const int steps = static_cast<int>(x.inputs / kTileInputs);
  const PackedWeight& weight = *call.weight;
  const Runs::Item item = runs[index];
  const int blocks = (item.last_row - item.first_row + kBlockRows - 1) / kBlockRows;
  Tiles tiles;
  Ahead ahead;
  Finish<float> pending;
  const Results results(call, item.first_row,
                        thread_scratch(Results::bytes(call, item.last_row - item.first_row)));
  const auto finish = [&](int panel, int row, int rows, float* sums) {
    finish_rows(call, panel, row, rows, sums, results.at(row));
  };
  runs.each_panel(weight, index, call.partner(), [&](int panel, const uint8_t* next) {
    if (call.rows > kTileRows)  // else see fetch_quarter
      ahead.start(next, weight.shape.panel_bytes(), 2 * steps * blocks);
    for_blocks(item.first_row, item.last_row, [&](int first, int last) {
      const Block block = x.block(first, last);
      tiles.configure(block.upper, block.lower);
      multiply<true>(block, weight.panel(panel), 0, steps, pending.sums(), [&] {
        pending.some(finish);
        ahead.step();
      });
      pending.rest(finish);
      pending.put(panel, first, last - first);
    });
  });
  pending.rest(finish);
}

}  // namespace

void linear_bf16(const LinearCall& call) {
  const Activations x = arrange(call);
  const Runs runs(call, x.inputs * sizeof(bf16_t));
  parallel_for(runs.count(), [&](int i) { run_panels(call, x, runs, i); });
}

}  // namespace octavo::amx
