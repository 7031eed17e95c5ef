#include "runtime/roofline.h"
#include "runtime/vectors.h"

namespace octavo::OCTAVO_ISA {

constexpr int kChains = 10;  // independent sums, enough to hide the latency of multiply-adds
extern const double flops_per_round = 2.0 * kLanes * kChains;

float multiply(int rounds) {
  const Vec factor = Vec{} + 0.999f, term = Vec{} + 0.1f;
  Vec sums[kChains];
  for (int c = 0; c < kChains; ++c) sums[c] = term * static_cast<float>(c);
  for (int round = 0; round < rounds; ++round)
    for (int c = 0; c < kChains; ++c) sums[c] = sums[c] * factor + term;
  float total = 0;
  for (int c = 0; c < kChains; ++c) total += sums[c][0];
  return total;
}

}  // namespace octavo::OCTAVO_ISA
