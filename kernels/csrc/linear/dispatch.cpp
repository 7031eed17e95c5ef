#include "runtime/dispatch.h"
#include "linear/kernels.h"

namespace octavo {
namespace {

#if defined(__x86_64__)

// Whether kernels may round activations and weights: not for float32 results or exact products.
bool may_round(const LinearCall& call) { return !call.exact && call.y_type != Float::f32; }

// Whether the integer kernels of AVX-512 and AMX support these weights.
bool has_integer_kernel(const PackedShape& shape) {
  return shape.affine() && (shape.bits == 8 || shape.bits == 4);
}

// Whether the activations are bf16 or may be rounded to it.
bool bf16_suffices(const LinearCall& call) { return call.x_type == Float::bf16 || may_round(call); }

void run_avx2(const LinearCall& call) {
  if (!may_round(call)) return avx2::linear_float32(call);
  if (call.weight->shape.quantized()) avx2::linear_integer(call);
  else if (call.weight->fixed_steps(0) != nullptr) avx2::linear_fixed(call);  // y is bf16, so x is too
  else avx2::linear_float32(call);
}

// Chooses AVX-512 if enough rows share codes unpacked to bytes (measured); results are bit-identical.
void run_other_integers(const LinearCall& call) {
  const int enough_rows = call.weight->shape.kind == WeightKind::mxfp4 ? 4 : 2;
  if (call.rows < enough_rows) avx2::linear_integer(call);
  else avx512::linear_planes(call);
}

void run_avx512(const LinearCall& call) {
  const PackedShape& shape = call.weight->shape;
  if (shape.kind == WeightKind::bf16 && bf16_suffices(call)) avx512::linear_bf16(call);
  else if (call.weight->per_channel() && may_round(call)) avx512::linear_channels(call);
  else if (has_integer_kernel(shape) && may_round(call)) avx512::linear_int8(call);
  else if (shape.quantized() && may_round(call)) run_other_integers(call);
  else avx512::linear_float32(call);
}

// Chooses AMX for int8 if laying panels out again for tiles pays off for so many rows (measured). 4-bit codes
// must be widened anyway, so fewer rows suffice. Both kernels give bit-identical results.
void run_amx_int8(const LinearCall& call) {
  const int enough_rows = call.weight->shape.bits == 8 ? 56 : 28;
  if (call.rows < enough_rows) avx512::linear_int8(call);
  else amx::linear_int8_rows(call);
}

// Chooses AMX for channels if there are enough rows (measured). Widening 4-bit codes for AMX tiles pays off
// only with two tiles of rows. Both kernels give bit-identical results.
void run_amx_channels(const LinearCall& call) {
  const int enough_rows = call.weight->shape.bits == 8 ? 4 : 13;
  if (call.rows < enough_rows) avx512::linear_channels(call);
  else amx::linear_channels(call);
}

void run_amx(const LinearCall& call) {
  const PackedShape& shape = call.weight->shape;
  if (shape.kind == WeightKind::bf16 && bf16_suffices(call)) amx::linear_bf16(call);
  else if (call.weight->per_channel() && may_round(call)) run_amx_channels(call);
  else if (has_integer_kernel(shape) && may_round(call)) run_amx_int8(call);
  else if (shape.quantized() && may_round(call)) run_other_integers(call);
  else avx512::linear_float32(call);
}

#endif

}  // namespace

void run_linear(const LinearCall& call) {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::amx: return run_amx(call);
    case Isa::avx512: return run_avx512(call);
    case Isa::avx2: return run_avx2(call);
    case Isa::generic: break;
  }
#endif
  generic::linear_float32(call);
}

}  // namespace octavo
