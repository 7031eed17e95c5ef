// The kernels of linear layers: y = x W^T (+ bias) (+ residual).
//
// Every row of y is computed by the same operations in the same order whatever the number of rows and
// of threads: a request's numbers do not depend on who shares its batch. (They do depend on the
// instruction set.)
#pragma once

#include "packed.h"

namespace octavo {

struct LinearCall {
  const PackedWeight* weight;
  const void* x;         // [rows, inputs], row-major
  void* y;               // [rows, outputs], row-major
  const void* residual;  // like y, added before the one rounding to y's type; or null
  Float x_type;
  Float y_type;  // also the residual's
  int rows;
  // Keep activations in the precision they come in. Otherwise, unless y is float32, a kernel may round
  // them: to bf16, or (q8 and q4 on AVX-512 without AMX) to 8 bits per row and group of inputs.
  bool exact;
};

// Run a call on the level in use: its own kernels where it has them, else its portable path.
void run_linear(const LinearCall& call);

// The portable paths: float32 throughout, right for every weight.
namespace generic {
void linear_float32(const LinearCall& call);
}
namespace avx2 {
void linear_float32(const LinearCall& call);
}
namespace avx512 {
void linear_float32(const LinearCall& call);
// bf16 activations and weights by VDPBF16PS.
void linear_bf16(const LinearCall& call);
// q8 and q4 weights by VPDPBUSD, activations rounded to 8 bits per row and group.
void linear_int8(const LinearCall& call);
}  // namespace avx512
namespace amx {
// bf16 activations by TDPBF16PS, for bf16 weights and for q8 and q4 ones, whose codes stay exact.
void linear_bf16(const LinearCall& call);
void linear_quantized(const LinearCall& call);
}  // namespace amx

}  // namespace octavo
