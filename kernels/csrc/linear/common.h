// What the linear kernels of all instruction sets share. Internal linkage: see numeric.h.
#pragma once

#include <algorithm>
#include <type_traits>

#include "linear/kernels.h"
#include "runtime/threads.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

// Rows [first, last) of one panel of 64 outputs: the unit of work handed to a thread.
struct Item {
  int panel;
  int first;
  int last;
};

// Items of at most `max_rows` rows; those of one panel are adjacent, so that it stays in cache.
struct Items {
  int num_blocks;
  int max_rows;
  int rows;
  int partner;  // see LinearCall
  int count;    // without those of partners

  Items(const LinearCall& call, int max_rows)
      : num_blocks((call.rows + max_rows - 1) / max_rows),
        max_rows(max_rows),
        rows(call.rows),
        partner(call.partner()),
        count(num_blocks * (call.weight->shape.num_panels() - partner)) {}

  Item operator[](int index) const {
    const int first = index % num_blocks * max_rows;
    return {index / num_blocks, first, first + max_rows < rows ? first + max_rows : rows};
  }
};

// body(item) for all items, on all threads.
template <class Body>
inline void for_items(const Items& items, Body&& body) {
  parallel_for(items.count, [&](int i) {
    Item item = items[i];
    body(item);
    if (items.partner == 0) return;
    item.panel += items.partner;
    body(item);
  });
}

// Rows of a call in tiles of at most `most`: as few as possible, as even as possible. Activations are laid
// out tile by tile, [inputs][rows of the tile], so that a kernel reads them in a row.
struct RowTiles {
  int rows;
  int count;

  RowTiles(int rows, int most) : rows(rows), count((rows + most - 1) / most) {}

  int first(int tile) const { return static_cast<int>(static_cast<int64_t>(rows) * tile / count); }
  int size(int tile) const { return first(tile + 1) - first(tile); }
};

// Panels in a row that a thread takes at once when each is used only once: reading on through memory is
// what prefetchers are good at. Not so many that threads would wait for the last one.
inline int panels_in_a_run(const PackedShape& shape, int panels) {
  constexpr int kRunsPerThread = 8;
  constexpr std::size_t kRunBytes = 512 * 1024;
  const int share = panels / (kRunsPerThread * num_threads());
  const int most = static_cast<int>(kRunBytes / shape.panel_bytes());
  return std::max(1, std::min(share, most));
}

// body(panel, first tile, last tile) for items of at most `most` tiles of one panel, on all threads. Those
// of one panel are adjacent, so that it stays in cache.
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

// body(integral constant of `count`) for 1 <= count <= most <= 6.
template <int most, class Body>
inline void with_rows(int count, Body&& body) {
  if constexpr (most > 1) {
    if (count < most) return with_rows<most - 1>(count, body);
  }
  body(std::integral_constant<int, most>());
}

// The largest of `width` results, rounded to `type`, of the outputs from `start` on.
inline Largest largest_of(Float type, int start, int width, const float* sums) {
  alignas(64) uint8_t rounded[sizeof(float) * kPanel];
  alignas(64) float values[kPanel] = {};
  alignas(64) int32_t keys[kPanel];
  store_floats(rounded, type, 0, width, sums);
  load_floats(rounded, type, 0, width, values);
  // Whole panels, in loops that compilers vectorize; INT32_MIN is no float's key.
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

// The same of a layer with gates: these are stored where the results will be, until their partners come.
inline void finish_gated(const LinearCall& call, Activation activation, int panel, int first, int count,
                         const float* bias, float* sums) {
  constexpr int kRows = 16;  // at once
  alignas(64) uint8_t others[kRows * kPanel * sizeof(float)];
  const int outputs = call.weight->shape.outputs / 2, start = panel * kPanel;
  const bool is_gate = start < outputs;
  const int64_t column = is_gate ? start : start - outputs;
  for (int row = 0; row < count; row += kRows) {
    const int rows = count - row < kRows ? count - row : kRows;
    const int64_t offset = int64_t{first + row} * outputs + column;
    for (int m = 0; m < rows; ++m, sums += kPanel) {
      if (bias != nullptr)
        for (int n = 0; n < kPanel; ++n) sums[n] += bias[n];
      if (is_gate) store_floats(call.y, call.y_type, offset + int64_t{m} * outputs, kPanel, sums);
      else store_floats(others, call.y_type, m * kPanel, kPanel, sums);
    }
    if (is_gate) continue;
    void* const y = static_cast<char*>(call.y) + offset * float_size(call.y_type);
    run_gated_here({{y, outputs}, {others, kPanel}, y, outputs, call.y_type, activation, rows, kPanel});
  }
}

// Write sums [count][64] (float32) of rows [first, first + count) as results: add bias and residual,
// round once, and leave out the outputs past the last.
inline void finish_rows(const LinearCall& call, int panel, int first, int count, float* sums) {
  const PackedShape& shape = call.weight->shape;
  const int start = panel * kPanel;
  const int width = shape.outputs - start < kPanel ? shape.outputs - start : kPanel;
  const float* bias = call.weight->bias.empty() ? nullptr : call.weight->bias.data() + start;
  if (call.gate) return finish_gated(call, *call.gate, panel, first, count, bias, sums);
  for (int m = 0; m < count; ++m, sums += kPanel) {
    const std::size_t offset = static_cast<std::size_t>(first + m) * shape.outputs + start;
    if (bias != nullptr)
      for (int n = 0; n < kPanel; ++n) sums[n] += bias[n];
    if (call.residual != nullptr) {
      alignas(64) float added[kPanel];
      load_floats(call.residual, call.y_type, offset, width, added);
      for (int n = 0; n < width; ++n) sums[n] += added[n];
    }
    if (call.largest == nullptr) store_floats(call.y, call.y_type, offset, width, sums);
    else
      call.largest[static_cast<std::size_t>(panel) * call.rows + first + m] =
          largest_of(call.y_type, start, width, sums);
  }
}

// x as bf16 [rows, padded_inputs], zero in the padding; where it is not that already, in the caller's
// scratch slot 1.
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
