// The kernels of linear layers: y = x W^T (+ bias) (+ residual).
//
// Every row of y is computed by the same operations in the same order for any number of rows and threads, so
// a request's numbers do not depend on its batch. (They do depend on the instruction set.)
#pragma once

#include <optional>

#include "linear/packed.h"
#include "ops/ops.h"

namespace octavo {

// The largest of some results of a row, the first of equals. Keys have the order of their floats, with NaN
// above all (see ordered_key).
struct Largest {
  int32_t key;
  int32_t output;
};

struct LinearCall {
  const PackedWeight* weight;
  const void* x;         // [rows, inputs], row-major
  void* y;               // [rows, outputs], row-major
  const void* residual;  // like y, added before the one rounding to y's type; or null
  Float x_type;
  Float y_type;  // also the residual's
  int rows;
  // Whether to keep the precision of activations and weights. Otherwise, unless y is float32, a kernel may
  // round them: activations to bf16, or for quantized weights to 8 bits per row and group of inputs (per row
  // for weights with one scale per output), or both to fixed point per group.
  bool exact;
  // If set, nothing is written to y, but here: [panels][rows], the largest result of each panel, rounded
  // to y's type like any result.
  Largest* largest = nullptr;
  // If set, the first half of the outputs, whole panels, are gates, and y [rows, outputs / 2] is
  // activation(gate) * what the second half has, each rounded to y's type first. No residual then.
  std::optional<Activation> gate = std::nullopt;

  // Panels from a gate's to its partner's; 0: no gates. One thread takes both, in this order.
  int partner() const { return gate ? weight->shape.num_panels() / 2 : 0; }
};

// Run a call on the level in use: its own kernels where it has them, else its portable path.
void run_linear(const LinearCall& call);

// The portable paths: float32 throughout, correct for every weight.
namespace generic {
void linear_float32(const LinearCall& call);
}
namespace avx2 {
void linear_float32(const LinearCall& call);
// Quantized weights in integers, activations rounded to 8 bits per row and block of at most 64 inputs.
void linear_integer(const LinearCall& call);
// bf16 weights that have fixed_steps, and bf16 activations, in 16-bit fixed point.
void linear_fixed(const LinearCall& call);
// The steps of a packed panel of bf16 weights, as PackedWeight::fixed_steps has them; false if its weights do
// not allow any.
bool choose_fixed_steps(const PackedShape& shape, const uint8_t* panel, uint8_t* exponents);
}  // namespace avx2
namespace avx512 {
void linear_float32(const LinearCall& call);
// bf16 activations and weights by VDPBF16PS, or by FMAs that have its bits.
void linear_bf16(const LinearCall& call);
// Affine weights of 8 and 4 bits by VPDPBUSD, activations rounded to 8 bits per row and group.
void linear_int8(const LinearCall& call);
// Weights of one scale per output by VPDPBUSD, activations rounded to 8 bits per row.
void linear_channels(const LinearCall& call);
// Other quantized weights by VPDPBUSD: a row's results have the same bits as from avx2::linear_integer.
void linear_planes(const LinearCall& call);
}  // namespace avx512
namespace amx {
// The same integers by TDPBSUD, for many rows: a row's results have the same bits as from
// avx512::linear_int8.
void linear_int8_rows(const LinearCall& call);
// The same bits as from avx512::linear_channels, by TDPBSUD.
void linear_channels(const LinearCall& call);
// bf16 activations and weights by TDPBF16PS.
void linear_bf16(const LinearCall& call);
}  // namespace amx

}  // namespace octavo
