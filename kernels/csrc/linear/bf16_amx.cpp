// bf16 weights on AMX tiles.
//
// Tiles are used for one row too: they outrun DRAM even then, and so a row's sums are the same in any
// batch. With many rows, inputs are taken in chunks whose weights stay in the first-level cache while
// all rows pass; each sum continues where the last chunk left it, in the same order of steps.
#include "linear/amx_tiles.h"

namespace octavo::amx {
namespace {

constexpr int kItemRows = 512;
constexpr int kChunkSteps = 8;  // 256 inputs of a panel: 32 KiB

// From this number of rows on it pays to copy them into tiles.
constexpr int kTiledRows = 8;

Activations arrange(const LinearCall& call) {
  const std::size_t padded = call.weight->shape.padded_inputs();
  const bf16_t* rows = bf16_rows(call);
  if (call.rows < kTiledRows) return {rows, padded, false};
  const std::size_t tiled_rows = (call.rows + kTileRows - 1) / kTileRows * kTileRows;
  bf16_t* tiles = static_cast<bf16_t*>(thread_scratch(sizeof(bf16_t) * padded * tiled_rows, 2));
  parallel_for(call.rows, [&](int row) {
    const bf16_t* from = rows + row * padded;
    for (std::size_t step = 0; step < padded / kTileInputs; ++step)
      _mm512_storeu_si512(tiled_place(tiles, padded, row, step),
                          _mm512_loadu_si512(from + step * kTileInputs));
  });
  return {tiles, padded, true};
}

// A quarter of a step's bytes of weights, asked for in L2 while those before are multiplied: loads of tiles
// alone keep too few lines under way.
inline __attribute__((always_inline)) void fetch_quarter(const uint8_t* weights, int quarter) {
  constexpr int kAhead = 2048;  // bytes
  const uint8_t* const from = weights + kAhead + kStepBytes / 4 * quarter;
  for (int at = 0; at < kStepBytes / 4; at += 64)
    _mm_prefetch(reinterpret_cast<const char*>(from + at), _MM_HINT_T1);
}

// Few rows: the whole panel goes by once, and sums stay in tiles.
void run_block(const LinearCall& call, const Activations& x, const Item& item) {
  alignas(64) float sums[kBlockRows * kPanel];
  const Block block = x.block(item.first, item.last);
  const int steps = static_cast<int>(x.inputs / kTileInputs);
  const uint8_t* const panel = call.weight->panel(item.panel);
  Tiles tiles;
  tiles.configure(block.upper, block.lower);
  if (block.lower > 0) multiply_both(block, panel, 0, steps, true, sums);
  else multiply_upper(block, panel, 0, steps, true, sums, fetch_quarter);
  finish_rows(call, item.panel, item.first, item.last - item.first, sums);
}

void run_chunks(const LinearCall& call, const Activations& x, const Item& item) {
  const int steps = static_cast<int>(x.inputs / kTileInputs);
  const uint8_t* panel = call.weight->panel(item.panel);
  float* sums = static_cast<float*>(thread_scratch(sizeof(float) * kPanel * (item.last - item.first)));
  Tiles tiles;
  for (int step = 0; step < steps; step += kChunkSteps) {
    const int count = steps - step < kChunkSteps ? steps - step : kChunkSteps;
    for_blocks(item, [&](int first, int last) {
      const Block block = x.block(first, last);
      tiles.configure(block.upper, block.lower);
      float* target = sums + (first - item.first) * kPanel;
      multiply(block, panel + step * kStepBytes, step, count, step == 0, target);
      if (step + count == steps) finish_rows(call, item.panel, first, last - first, target);
    });
  }
}

}  // namespace

void linear_bf16(const LinearCall& call) {
  const Activations x = arrange(call);
  const Items items(call, item_rows(call, kItemRows));
  for_items(items, [&](const Item& item) {
    if (item.last - item.first <= kBlockRows) run_block(call, x, item);
    else run_chunks(call, x, item);
  });
}

}  // namespace octavo::amx
