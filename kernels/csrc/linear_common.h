// What the linear kernels of all instruction sets share. Internal linkage: see numeric.h.
#pragma once

#include "linear_kernels.h"
#include "threads.h"

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
  int count;

  Items(const LinearCall& call, int max_rows)
      : num_blocks((call.rows + max_rows - 1) / max_rows),
        max_rows(max_rows),
        rows(call.rows),
        count(num_blocks * call.weight->shape.num_panels()) {}

  Item operator[](int index) const {
    const int first = index % num_blocks * max_rows;
    return {index / num_blocks, first, first + max_rows < rows ? first + max_rows : rows};
  }
};

// A row of results of a whole or partial panel. AVX-512's own conversion rounds as ours does, but takes
// subnormal numbers for zero.
inline void store_row(void* y, Float type, std::size_t offset, int width, const float* sums) {
#if defined(__AVX512BF16__)
  if (type == Float::bf16 && width == kPanel) {
    bf16_t* to = static_cast<bf16_t*>(y) + offset;
    for (int n = 0; n < kPanel; n += 32) {
      const __m512bh pair = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(sums + n + 16), _mm512_loadu_ps(sums + n));
      _mm512_storeu_si512(to + n, reinterpret_cast<__m512i>(pair));
    }
    return;
  }
#endif
  store_floats(y, type, offset, width, sums);
}

// Write sums [count][64] (float32) of rows [first, first + count) as results: add bias and residual,
// round once, and leave out the outputs past the last.
inline void finish_rows(const LinearCall& call, int panel, int first, int count, float* sums) {
  const PackedShape& shape = call.weight->shape;
  const int start = panel * kPanel;
  const int width = shape.outputs - start < kPanel ? shape.outputs - start : kPanel;
  const float* bias = call.weight->bias.empty() ? nullptr : call.weight->bias.data() + start;
  for (int m = 0; m < count; ++m, sums += kPanel) {
    const std::size_t offset = static_cast<std::size_t>(first + m) * shape.outputs + start;
    if (bias != nullptr)
      for (int n = 0; n < kPanel; ++n) sums[n] += bias[n];
    if (call.residual != nullptr) {
      alignas(64) float added[kPanel];
      load_floats(call.residual, call.y_type, offset, width, added);
      for (int n = 0; n < width; ++n) sums[n] += added[n];
    }
    store_row(call.y, call.y_type, offset, width, sums);
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
