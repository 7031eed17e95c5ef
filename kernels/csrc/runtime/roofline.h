// The machine's limits, measured: what a kernel's speed is a fraction of.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// One thread's share of a measurement. `sum_bytes` reads a buffer once, `multiply` runs that many
// rounds of the level's best multiply-add on registers; both return something that depends on all of
// it. `flops_per_round` is what one round of `multiply` computes.
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
  double bf16_flops_per_s;  // 0 where the level has no such instruction
};

// `read_bytes`: what no cache holds, of which memory's rate is taken. With 1 GiB it takes about half a
// second.
Roofline measure_roofline(std::size_t read_bytes);

}  // namespace octavo
