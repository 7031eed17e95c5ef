// Measured limits of this machine's products, to which the speed of kernels is compared.
#pragma once

#include <utility>

namespace octavo {

// One thread's share of a measurement: `rounds` times `flops_per_round` operations in registers with the
// level's best multiply-add. Returns a value that depends on all the work, so that compilers cannot remove
// it.
#define OCTAVO_DECLARE_ROOFLINE(isa)   \
  namespace isa {                      \
  float multiply(int rounds);          \
  extern const double flops_per_round; \
  }
OCTAVO_DECLARE_ROOFLINE(generic)
OCTAVO_DECLARE_ROOFLINE(avx2)
OCTAVO_DECLARE_ROOFLINE(avx512)
#undef OCTAVO_DECLARE_ROOFLINE

namespace avx512 {
float multiply_bf16(int rounds);  // VDPBF16PS
extern const double bf16_flops_per_round;
}  // namespace avx512
namespace amx {
float multiply_bf16(int rounds);  // TDPBF16PS
extern const double bf16_flops_per_round;
}  // namespace amx

// Returns float32 and bf16 operations per second of all threads, with multiply and add counted as two; 0 if
// the level in use has no bf16 products.
std::pair<double, double> measure_flops();

}  // namespace octavo
