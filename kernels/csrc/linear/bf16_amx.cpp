// bf16 weights on AMX tiles.
//
// Even a single row uses tiles, because they are faster than DRAM anyway. So a row's sums are bit-identical
// in any batch. Sums stay in tiles over all inputs. Weights and rows are loaded from L2. Splitting inputs so
// that weights fit into L1 would be slower, because sums would then pass through memory.
#include "linear/amx_work.h"

namespace octavo::amx {
namespace {

// Fewest rows for which copying them into the tiled layout pays off.
constexpr int kTiledRows = 8;

// Most rows that each thread copies for itself. Shared copies would come from another core, and all threads
// would wait for the last part.
constexpr int kOwnRows = 64;

// Returns this thread's memory for all rows in the tiled layout; its next call reuses the memory.
Activations tiles_of_thread(const LinearCall& call) {
  const std::size_t padded = call.weight->shape.padded_inputs();
  return {static_cast<bf16_t*>(thread_scratch(sizeof(bf16_t) * padded * tiled_rows(call.rows), 2)), padded,
          true};
}

// Copies rows [first, last) into the tiled layout, and calls ahead.step() after each step of a row.
void arrange(const bf16_t* rows, const Activations& x, int first, int last, Ahead ahead = {}) {
  for (int row = first; row < last; ++row)
    for (std::size_t step = 0; step < x.inputs / kTileInputs; ++step) {
      _mm512_store_si512(tiled_place(const_cast<bf16_t*>(x.data), x.inputs, row, step),
                         _mm512_loadu_si512(rows + row * x.inputs + step * kTileInputs));
      ahead.step();
    }
}

// Multiplies each panel of an item by all blocks of rows.
void run_panels(const LinearCall& call, const Activations& x, const Work& work, const Work::Item& item) {
  const int steps = static_cast<int>(x.inputs / kTileInputs);
  const PackedWeight& weight = *call.weight;
  const int blocks = (item.last_row - item.first_row + kBlockRows - 1) / kBlockRows;
  Tiles tiles;
  Ahead ahead;
  Finish<float> pending;
  const auto finish = [&](int panel, int row, int rows, float* sums) {
    finish_rows(call, panel, row, rows, sums);
  };
  work.each_panel(weight, item, [&](int panel, const uint8_t* next) {
    if (call.rows > kTileRows)  // otherwise fetch_quarter prefetches weights
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
