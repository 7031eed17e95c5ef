// bf16 weights on AMX tiles.
//
// Tiles are used for one row too: they outrun DRAM even then, and so a row's sums are the same in any
// batch. They stay in tiles over all inputs: adding up in memory chunk by chunk, whose weights would then be
// in the first-level cache, takes longer than loading weights and rows from the second.
#include "linear/amx_results.h"
#include "linear/amx_work.h"

namespace octavo::amx {
namespace {

// From this number of rows on it pays to copy them into tiles.
constexpr int kTiledRows = 8;

// Up to this number each thread copies all of them: half of the tiles would come from another core, and all
// threads would wait until the last has copied its part.
constexpr int kOwnRows = 64;

// Room for all rows in tiles: this thread's, until it asks for others.
Activations tiles_of_thread(const LinearCall& call) {
  const std::size_t padded = call.weight->shape.padded_inputs();
  return {static_cast<bf16_t*>(thread_scratch(sizeof(bf16_t) * padded * tiled_rows(call.rows), 2)), padded,
          true};
}

// Rows [first, last) into tiles, and a step of `ahead` after each step of a row.
void arrange(const bf16_t* rows, const Activations& x, int first, int last, Ahead ahead = {}) {
  for (int row = first; row < last; ++row)
    for (std::size_t step = 0; step < x.inputs / kTileInputs; ++step) {
      _mm512_store_si512(tiled_place(const_cast<bf16_t*>(x.data), x.inputs, row, step),
                         _mm512_loadu_si512(rows + row * x.inputs + step * kTileInputs));
      ahead.step();
    }
}

// The panels of an item, and for each all blocks of rows.
void run_panels(const LinearCall& call, const Activations& x, const Work& work, const Work::Item& item) {
  const int steps = static_cast<int>(x.inputs / kTileInputs);
  const PackedWeight& weight = *call.weight;
  const int blocks = (item.last_row - item.first_row + kBlockRows - 1) / kBlockRows;
  Tiles tiles;
  Ahead ahead;
  Finish<float> pending;
  const Results results(call, item.first_row,
                        thread_scratch(Results::bytes(call, item.last_row - item.first_row)));
  const auto finish = [&](int panel, int row, int rows, float* sums) {
    finish_rows(call, panel, row, rows, sums, results.at(row));
  };
  work.each_panel(weight, item, [&](int panel, const uint8_t* next) {
    if (call.rows > kTileRows)  // else see fetch_quarter
      ahead.start(next, weight.shape.panel_bytes(), 2 * steps * blocks);
    for_blocks(item.first_row, item.last_row, [&](int first, int last) {
      tiles.configure(last - first);
      multiply<true>(x.steps(first, weight.panel(panel)), last - first, pending.sums(), [&] {
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
  const std::size_t inputs = call.weight->shape.padded_inputs();
  const Work work(call, inputs * sizeof(bf16_t));
  const bf16_t* const rows = bf16_rows(call);
  if (call.rows < kTiledRows)
    return work.run([&](const Work::Item& item) { run_panels(call, {rows, inputs, false}, work, item); });
  if (call.rows <= kOwnRows && work.is_one_block())
    return work.run_one_block([&](const Work::Item& item, bool is_first) {
      const Activations x = tiles_of_thread(call);
      if (is_first) {
        Ahead ahead;
        if (call.rows > kTileRows)
          ahead.start(call.weight->panel(item.first_panel), call.weight->shape.panel_bytes(),
                      static_cast<int>(call.rows * (inputs / kTileInputs)));
        arrange(rows, x, 0, call.rows, ahead);
      }
      run_panels(call, x, work, item);
    });
  const Activations x = tiles_of_thread(call);
  work.run([&](int first, int last) { arrange(rows, x, first, last); },
           [&](const Work::Item& item) { run_panels(call, x, work, item); });
}

}  // namespace octavo::amx
