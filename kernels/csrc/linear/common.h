// Common parts of the linear kernels of all instruction sets. Internal linkage: see numeric.h.
#pragma once

#include <algorithm>
#include <type_traits>

#include "linear/kernels.h"
#include "runtime/threads.h"
#include "runtime/unrolled.h"

namespace octavo {
namespace {

// Divides a call's rows into tiles of at most `most`, as few and as equal as possible. Activations are laid
// out tile by tile, [inputs][rows of the tile], so that a kernel reads them sequentially.
struct RowTiles {
  int rows;
  int count;

  RowTiles(int rows, int most) : rows(rows), count((rows + most - 1) / most) {}

  int first(int tile) const { return static_cast<int>(static_cast<int64_t>(rows) * tile / count); }
  int size(int tile) const { return first(tile + 1) - first(tile); }
};

// Calls body(tile) for all row tiles, on all threads unless there are few rows.
template <class Body>
inline void for_tiles(const LinearCall& call, const RowTiles& tiles, Body&& body) {
  if (call.rows > 8) return parallel_for(tiles.count, body);
  for (int tile = 0; tile < tiles.count; ++tile) body(tile);
}

// Returns how many consecutive panels a thread takes, if each panel is used once. Long runs help the
// prefetchers, but short ones let threads end together.
inline int panels_in_a_run(const PackedShape& shape, int panels) {
  constexpr int kRunsPerThread = 16;
  constexpr std::size_t kRunBytes = 512 * 1024;
  const int share = panels / (kRunsPerThread * num_threads());
  const int most = static_cast<int>(kRunBytes / shape.panel_bytes());
  return std::max(1, std::min(share, most));
}

// Calls body(panel, first tile, last tile) on all threads, for items of at most `most` row tiles of a panel.
// Items of one panel follow each other, so that it stays in cache.
template <class Body>
inline void for_items(const LinearCall& call, const RowTiles& tiles, int most, Body&& body) {
  const int partner = call.partner(), panels = call.weight->shape.num_panels() - partner,
            blocks = (tiles.count + most - 1) / most;
  if (blocks == 1) {
    const int run = panels_in_a_run(call.weight->shape, panels);
    return parallel_for((panels + run - 1) / run, [&](int item) {
      const int first = item * run, last = std::min(panels, first + run);
      for (int panel = first; panel < last; ++panel) body(panel, 0, tiles.count);
      for (int panel = first; panel < last && partner > 0; ++panel) body(panel + partner, 0, tiles.count);
    });
  }
  parallel_for(blocks * panels, [&](int item) {
    const int panel = item / blocks, block = item % blocks;
    const int first = tiles.count * block / blocks, last = tiles.count * (block + 1) / blocks;
    body(panel, first, last);
    if (partner > 0) body(panel + partner, first, last);
  });
}

// Returns the largest of outputs [start, start + width), rounded to `type`.
inline Largest largest_of(Float type, int start, int width, const float* sums) {
  alignas(64) uint8_t rounded[sizeof(float) * kPanel];
  alignas(64) float values[kPanel] = {};
  alignas(64) int32_t keys[kPanel];
  store_floats(rounded, type, 0, width, sums);
  load_floats(rounded, type, 0, width, values);
  // Compares all 64 keys, because compilers vectorize that; INT32_MIN is not a key of any float.
  for (int n = 0; n < kPanel; ++n) keys[n] = ordered_key(values[n]);
  for (int n = width; n < kPanel; ++n) keys[n] = INT32_MIN;
  int32_t most = INT32_MIN;
  for (int n = 0; n < kPanel; ++n) most = keys[n] > most ? keys[n] : most;
  int place = width;
  for (int n = 0; n < kPanel; ++n) {
    const int candidate = keys[n] == most ? n : width;
    place = candidate < place ? candidate : place;
  }
  return {most, start + place};
}

// Values that are added to a panel's sums before rounding; null: none.
struct Added {
  const float* bias;     // [64]
  const void* residual;  // of y's type, rows `stride` values apart
  int64_t stride = 0;

  // Adds bias and residual to the first `width` of the 64 sums of row m.
  void add_to(float* sums, Float type, int m, int width) const {
    if (bias != nullptr)
      for (int n = 0; n < kPanel; ++n) sums[n] += bias[n];
    if (residual == nullptr) return;
    alignas(64) float values[kPanel];
    load_floats(residual, type, m * stride, width, values);
    for (int n = 0; n < width; ++n) sums[n] += values[n];
  }
};

// Stores sums [count][64] plus `added` to rows of y: the first `width` of each row, rounded once to `type`.
// Rows of y are `stride` values apart.
inline void store_rows(const Added& added, int count, int width, float* sums, Float type, void* y,
                       int64_t stride) {
  for (int m = 0; m < count; ++m, sums += kPanel) {
    added.add_to(sums, type, m, width);
    if (type == Float::bf16) store_bf16(sums, width, static_cast<bf16_t*>(y) + m * stride);  // inlined
    else store_floats(y, type, m * stride, width, sums);
  }
}

// Finishes rows of a layer with gates: stores gates in y, then replaces them by the gated outputs.
inline void finish_gated(const LinearCall& call, Activation kind, const Added& added, int panel, int first,
                         int count, float* sums) {
  const int outputs = call.weight->shape.outputs / 2, start = panel * kPanel;
  const bool is_gate = start < outputs;
  const std::size_t value_bytes = float_size(call.y_type);
  char* y = static_cast<char*>(call.y) +
            value_bytes * (static_cast<std::size_t>(first) * outputs + (is_gate ? start : start - outputs));
  if (is_gate) return store_rows(added, count, kPanel, sums, call.y_type, y, outputs);
  constexpr int kRows = 16;  // rows at once
  alignas(64) uint8_t others[kRows * kPanel * sizeof(float)];
  for (int row = 0; row < count; row += kRows, y += value_bytes * kRows * outputs) {
    const int rows = std::min(count - row, kRows);
    store_rows(added, rows, kPanel, sums + row * kPanel, call.y_type, others, kPanel);
    run_gated_here({{y, outputs}, {others, kPanel}, y, outputs, call.y_type, kind, rows, kPanel});
  }
}

// Writes float32 sums [count][64] of rows [first, first + count) as results: adds bias and residual, rounds
// once, and leaves out padding outputs.
inline void finish_rows(const LinearCall& call, int panel, int first, int count, float* sums) {
  const int outputs = call.weight->shape.outputs, start = panel * kPanel,
            width = std::min(kPanel, outputs - start);
  const std::size_t at = float_size(call.y_type) * (static_cast<std::size_t>(outputs) * first + start);
  Added added{nullptr, nullptr, outputs};
  if (!call.weight->bias.empty()) added.bias = call.weight->bias.data() + start;
  if (call.gate) return finish_gated(call, *call.gate, added, panel, first, count, sums);
  if (call.residual != nullptr) added.residual = static_cast<const char*>(call.residual) + at;
  if (call.largest == nullptr)
    return store_rows(added, count, width, sums, call.y_type, static_cast<char*>(call.y) + at, outputs);
  for (int m = 0; m < count; ++m, sums += kPanel) {
    added.add_to(sums, call.y_type, m, width);
    call.largest[static_cast<std::size_t>(panel) * call.rows + first + m] =
        largest_of(call.y_type, start, width, sums);
  }
}

// Returns x as bf16 [rows, padded_inputs] with zero padding: x itself if possible, else a copy in
// thread_scratch slot 1.
inline const bf16_t* bf16_rows(const LinearCall& call) {
  const int inputs = call.weight->shape.inputs, padded = call.weight->shape.padded_inputs();
  if (call.x_type == Float::bf16 && inputs == padded) return static_cast<const bf16_t*>(call.x);
  bf16_t* rows = static_cast<bf16_t*>(thread_scratch(sizeof(bf16_t) * padded * call.rows, 1));
  parallel_for(call.rows, [&](int m) {
    constexpr int kBlock = 256;
    float values[kBlock];
    bf16_t* row = rows + static_cast<std::size_t>(m) * padded;
    for (int k = 0; k < inputs; k += kBlock) {
      const int count = inputs - k < kBlock ? inputs - k : kBlock;
      load_floats(call.x, call.x_type, static_cast<std::size_t>(m) * inputs + k, count, values);
      store_floats(row, Float::bf16, k, count, values);
    }
    std::memset(row + inputs, 0, sizeof(bf16_t) * (padded - inputs));
  });
  return rows;
}

}  // namespace
}  // namespace octavo
