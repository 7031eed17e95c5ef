#include "runtime/dispatch.h"
#include "linear/kernels.h"

namespace octavo {
namespace {

#if defined(__x86_64__)

// Whether kernels may round activations and weights: not for float32 results or exact products.
bool may_round(const LinearCall& call) { return !call.exact && call.y_type != Float::f32; }

// Whether the activations are bf16 or may be rounded to it.
bool bf16_suffices(const LinearCall& call) { return call.x_type == Float::bf16 || may_round(call); }

void run_avx2(const LinearCall& call) {
  if (!may_round(call)) return avx2::linear_float32(call);
  if (call.weight->shape.quantized()) avx2::linear_integer(call);
  else if (call.weight->fixed_steps(0) != nullptr) avx2::linear_fixed(call);  // y is bf16, so x is too
  else avx2::linear_float32(call);
}

// Whether AMX multiplies integers, if the level has it: if there are enough rows (measured). Layers with
// scales of groups must be laid out again for tiles, and codes of 4 bits must be widened. Results are
// bit-identical.
bool takes_tiles(const LinearCall& call) {
  const bool wide = call.weight->shape.bits == 8;
  return isa() == Isa::amx && call.rows >= (call.weight->per_channel() ? (wide ? 4 : 13) : (wide ? 56 : 28));
}

void run_avx512(const LinearCall& call) {
  const PackedShape& shape = call.weight->shape;
  if (shape.kind == WeightKind::bf16 && bf16_suffices(call))
    return isa() == Isa::amx ? amx::linear_bf16(call) : avx512::linear_bf16(call);
  if (!shape.quantized() || !may_round(call)) return avx512::linear_float32(call);
  if (call.weight->per_channel())
    return takes_tiles(call) ? amx::linear_channels(call) : avx512::linear_channels(call);
  if (shape.affine() && (shape.bits == 8 || shape.bits == 4))
    return takes_tiles(call) ? amx::linear_int8_rows(call) : avx512::linear_integer(call);
  // AVX-512 if enough rows share codes unpacked to bytes (measured); results are bit-identical.
  if (call.rows < (shape.kind == WeightKind::mxfp4 ? 4 : 2)) avx2::linear_integer(call);
  else avx512::linear_integer(call);
}

#endif

}  // namespace

void run_linear(const LinearCall& call) {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::amx:
    case Isa::avx512: return run_avx512(call);
    case Isa::avx2: return run_avx2(call);
    case Isa::generic: break;
  }
#endif
  generic::linear_float32(call);
}

}  // namespace octavo
