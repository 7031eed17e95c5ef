// Measured limits of the machine, to which the speed of kernels is compared.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// One thread's share of a measurement. `sum_bytes` reads a buffer once. `multiply` does `rounds` times
// `flops_per_round` operations with the level's best multiply-add. Both return a value that depends on all
// their work, so that compilers cannot remove it.
#define OCTAVO_DECLARE_ROOFLINE(isa)                          \
  namespace isa {                                             \
  uint32_t sum_bytes(const uint8_t* data, std::size_t bytes); \
  float multiply(int rounds);                                 \
  extern const double flops_per_round;                        \
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

struct Roofline {
  double read_bytes_per_s;  // main memory, all threads
  double f32_flops_per_s;   // multiply and add counted as two
  double bf16_flops_per_s;  // 0 if the level has no bf16 multiply-add
};

// Measures the machine. `read_bytes`: bytes that are read to measure memory, more than any cache has; 1 GiB
// takes about half a second.
Roofline measure_roofline(std::size_t read_bytes);

}  // namespace octavo
