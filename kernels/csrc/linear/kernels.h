// The kernels of linear layers: y = x W^T (+ bias) (+ residual).
//
// Every row of y is computed by the same operations in the same order, for any number of rows and threads. So
// a request's results do not depend on its batch. They do depend on the instruction set.
#pragma once

#include <optional>

#include "linear/packed.h"
#include "ops/ops.h"

namespace octavo {

// The largest of some results in a row, and its index; the first one if several are equal. Keys are integers
// with the order of floats, and NaN is above all (see ordered_key).
struct Largest {
  int32_t key;
  int32_t output;
};

struct LinearCall {
  const PackedWeight* weight;
  const void* x;         // [rows, inputs], row-major
  void* y;               // [rows, outputs], row-major
  const void* residual;  // like y, added before the result is rounded to y's type; or null
  Float x_type;
  Float y_type;  // type of y and of the residual
  int rows;
  // Whether to keep the precision of activations and weights. Otherwise, unless y is float32, a kernel may
  // round them: activations to bf16, or for quantized weights to 8 bits per row and group of inputs (per row
  // for weights with one scale per output), or both to fixed point per group.
  bool exact;
  // If set, y is not written. Instead, the largest result of each panel and row, rounded to y's type, is
  // written here as [panels][rows].
  Largest* largest = nullptr;
  // If set, the first half of the outputs, which must be whole panels, are gates. Then y [rows, outputs / 2]
  // is activation(gate) times the output in the second half (its partner), after both are rounded to y's
  // type. There must be no residual.
  std::optional<Activation> gate = std::nullopt;

  // Returns the number of panels from a gate to its partner; 0: no gates. One thread computes both, the gate
  // first.
  int partner() const { return gate ? weight->shape.num_panels() / 2 : 0; }
};

// Runs a call on the instruction set in use: with its own kernels if it has them, else in its portable path.
void run_linear(const LinearCall& call);

// The portable paths: float32 throughout, correct for every weight.
namespace generic {
void linear_float32(const LinearCall& call);
}
namespace avx2 {
void linear_float32(const LinearCall& call);
// Multiplies quantized weights by activations rounded to 8 bits per row and block of at most 64 inputs.
void linear_integer(const LinearCall& call);
// Multiplies bf16 weights that have fixed_steps by bf16 activations, both as 16-bit fixed point.
void linear_fixed(const LinearCall& call);
}  // namespace avx2
namespace avx512 {
void linear_float32(const LinearCall& call);
// Multiplies bf16 activations and weights with VDPBF16PS or FMAs, whose results are bit-identical.
void linear_bf16(const LinearCall& call);
// Multiplies quantized weights with VPDPBUSD. Activations for affine weights of 8 and 4 bits are rounded to 8
// bits per row and group; results of others are bit-identical to avx2::linear_integer.
void linear_integer(const LinearCall& call);
// Multiplies weights with one scale per output by VPDPBUSD. Activations are rounded to 8 bits per row.
void linear_channels(const LinearCall& call);
}  // namespace avx512
namespace amx {
// Multiplies many rows by affine weights with TDPBSUD; bit-identical to avx512::linear_integer.
void linear_int8_rows(const LinearCall& call);
// Multiplies weights with one scale per output by TDPBSUD; bit-identical to avx512::linear_channels.
void linear_channels(const LinearCall& call);
// Multiplies bf16 activations and weights with TDPBF16PS.
void linear_bf16(const LinearCall& call);
}  // namespace amx

}  // namespace octavo
