// Arguments of the adapter kernels, without MLX types.
#pragma once

#include <cstddef>
#include <vector>

#include "runtime/lines.h"
#include "runtime/numeric.h"

namespace octavo {

// An adapter's part of one matrix, or of the matrices of `experts` experts, in the kernels' layout:
//
//   d_o = scale sum_r (sum_i x_i A[r, i]) B[r, o]
//
// DoRA's gain g [outputs] then multiplies everything except the bias: y_o becomes g_o (y_o - bias_o + d_o) +
// bias_o. Rows of A and of B are whole vectors, padded with zeros; ranks have no padding.
struct AdapterFactors {
  std::size_t num_bytes() const;

  int experts, rank, inputs, outputs;
  int a_stride, b_stride;  // distance between rows, in values
  Float type;              // of a and b: bf16 or f32
  float scale;
  Lines a, b;                     // [experts, rank, a_stride] and [experts, rank, b_stride]
  std::vector<float> gain, bias;  // empty: gains of one, biases of zero
};

// Rows of one step that use the same adapter and expert.
struct AdapterGroup {
  const AdapterFactors* factors;
  int expert;
  int part_offset;   // where its outputs begin in a row of y
  int first, count;  // rows order[first], order[first + 1], ...
  std::size_t z;     // where its products with A begin in the buffer z
};

struct AdapterCall {
  const void* x;
  Float x_type;
  const std::size_t* x_offsets;  // where each row begins in x, in values; null: rows are adjacent
  void* y;
  Float y_type;
  int inputs, y_stride;
  const int* order;
  const AdapterGroup* groups;
  int num_groups;
  float* z;
};

constexpr int kAdapterGroupRows = 16;  // most rows of a group

#define OCTAVO_DECLARE_ADAPTERS(isa)        \
  namespace isa {                           \
  void add_groups(const AdapterCall& call); \
  }
OCTAVO_DECLARE_ADAPTERS(generic)
OCTAVO_DECLARE_ADAPTERS(avx2)
OCTAVO_DECLARE_ADAPTERS(avx512)
#undef OCTAVO_DECLARE_ADAPTERS

}  // namespace octavo
